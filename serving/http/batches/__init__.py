"""Files and batches: requests of a file, answered beside those of clients."""
