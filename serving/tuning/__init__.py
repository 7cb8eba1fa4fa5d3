"""Measuring on this device: tile sizes of the kernels (`kernels`) and what attention costs
(`calibration`), each kept in the cache folder of the user."""
