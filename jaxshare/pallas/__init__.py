"""GPU kernels of block attention in Pallas, two files for each backend: attention over the work
items, and the merge of what they found.

mosaic_gpu is for Hopper; triton, which JAX has deprecated, for every GPU from Ampere on. `tiles`
says how either is cut, and `device` what it has to know of the GPU. Nothing here is imported before
a backend is called, but for those two.
"""
