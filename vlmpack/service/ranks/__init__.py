"""Several processes: their collective operations, and calls that all of them make."""
