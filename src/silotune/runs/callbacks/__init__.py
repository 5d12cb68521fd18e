"""Callbacks follow a run through its event log: its silos, rounds and end, whatever the engine.

- `base`: `Callback`, which users subclass, `RoundEnd`, and `EventFeed`, which reads new events and calls callbacks
- `display`: a line a round, or a bar in a notebook
- `trackers`: rounds as CSV, in TensorBoard, Weights & Biases and MLflow
"""

from silotune.runs.callbacks.base import Callback, RoundEnd

__all__ = ["Callback", "RoundEnd"]
