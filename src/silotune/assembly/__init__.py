"""Puts a run together: configuration → backbone, method, silos, coordinator. Nothing here trains."""
