"""Products of rows with quantised matrices on a CPU."""
