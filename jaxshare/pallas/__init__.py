"""GPU kernels: one file for each kernel and backend. There are none yet; on a GPU block attention runs through XLA."""
