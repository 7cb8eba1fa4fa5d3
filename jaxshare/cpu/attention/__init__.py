"""Block attention on a CPU."""
