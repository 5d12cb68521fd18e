"""Callbacks follow a run through its event log: its silos, rounds and end, whatever the engine."""

from silotune.runs.callbacks.base import Callback, RoundEnd

__all__ = ["Callback", "RoundEnd"]
