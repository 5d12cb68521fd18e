"""The run folder: checkpoints, events, versions, and their readers."""
