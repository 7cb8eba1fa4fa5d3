"""Products of rows with matrices on a CPU."""
