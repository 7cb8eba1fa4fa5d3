"""The KV cache of an engine: `manager` (keys and values of requests), `prefix_tree`, `pool` and
`free_list` (where they are), `lease` (memory for sessions), and eviction (`policy`, `eviction`,
`contribution`)."""
