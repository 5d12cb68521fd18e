"""Processes of a deployment: supervision, restarts, fork server, watchdog."""
