"""Tools for those who change silotune; each runs as `python -m scripts.NAME` in the root of the repository."""
