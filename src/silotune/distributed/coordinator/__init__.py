"""The coordinator's side of a run over Flower.

- `server_app`: Flower's entry point
- `coordinate`: a whole run: handshake, rounds, summary
- `dispatcher`: sends requests to silos and waits for replies
- `engine`: rounds, scores and checkpoints over the dispatcher
- `run_registry`: the run's id and its silos' tasks
- `status_files`: started, progress and outcome as files, and a reader for them
"""
