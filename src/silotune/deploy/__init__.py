"""Sets up the machines of a federation and starts its runs, for `silotune federation` and `silotune silo`."""
