"""Builds a run from its configuration: model, silos and coordinator. Nothing here trains."""
