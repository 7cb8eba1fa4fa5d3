"""GPU kernels of block attention in Pallas, of products with quantised matrices and those of
experts, and of draws of tokens.

Each backend has one for attention over the work items, and one that merges partial results.
mosaic_gpu is for Hopper; triton, which JAX has deprecated, for every GPU from Ampere on. `tiles`
has the sizes of their tiles, and `device` the facts about the GPU. Only those two are imported
before a backend is called.
"""
