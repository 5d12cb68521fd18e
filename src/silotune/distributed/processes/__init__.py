"""Processes on one machine: started, logged, restarted and ended together; forked from one that has imported."""
