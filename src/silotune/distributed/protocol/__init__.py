"""Defines the messages between coordinator and silos, the settings both must share, and audit entries."""
