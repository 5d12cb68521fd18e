"""Metrics and predictions."""
