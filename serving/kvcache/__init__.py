"""The KV cache as the engine hands it out: `manager` (who has which tokens), `prefix_tree`, `pool`
and `free_list` (where they are), `lease` (room for sessions), and what is evicted (`policy`,
`contribution`)."""
