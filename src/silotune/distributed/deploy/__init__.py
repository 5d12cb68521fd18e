"""The commands of a deployment (`silotune federation`, `silo join`), and `--engine flower-local`."""
