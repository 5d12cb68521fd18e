"""The coordinator over Flower: dispatching requests, admitting silos, status files."""
