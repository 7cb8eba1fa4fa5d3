"""Products of rows with the matrices of their experts on a CPU."""
