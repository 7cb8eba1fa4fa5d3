"""Many machines.

They run replicas on Ray (`ray_pool`), the model that each of them loads (`model_spec`), shards of a
job (`shards`), and meshes of processes (`process_mesh`).
"""
