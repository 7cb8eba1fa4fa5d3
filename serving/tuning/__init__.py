"""Measurements on this device, saved in the user's cache folder.

`kernels` measures tile sizes of the GPU kernels, `calibration` the costs of attention.
"""
