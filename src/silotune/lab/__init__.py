"""Research with many runs: comparisons of methods over seeds, sweeps, task transfer, reports, published data sets."""
