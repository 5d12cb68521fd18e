"""Measurements that compare within one run. `python -m benchmarks NAME [--json]`."""
