"""Measurements on this device, kept in the user's cache folder.

`kernels` measures tile sizes of the GPU kernels, `calibration` the costs of attention; `diagnosis` looks
at the installation.
"""
