"""Sets up the machines of a federation and starts its runs: what `silotune federation` and `silotune silo` do."""
