"""Several servers behind one: each a replica of the model under Ray Serve."""
