"""Sessions of workers on the server's engine."""
