"""Warn before the first round of rows and head, and after the last one of refused updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from silotune.config import Config
from silotune.data.row_checks import warnings_of
from silotune.data.rows import SiloData

_POOLED_HEADS = ("linear", "mlp")


def run_warnings(config: Config, silos: Sequence[SiloData]) -> list[str]:
    """Return the warnings of a run, a line each.

    Args:
        config: the run's configuration.
        silos: all silos' rows.
    """
    lines = warnings_of(silos, config.partition.name != "none")
    pooled = config.head.name in _POOLED_HEADS
    if config.backbone.name == "default" and pooled and config.head.pooling != "mean":
        lines.append("head.pooling=first: the default backbone was trained with mean pooling (head.pooling=mean)")
    return lines


def refusal_warning(events: Iterable[Mapping[str, Any]]) -> str | None:
    """Return how many of a run's updates were refused and why the first was; None if all were accepted.

    Args:
        events: the run's events.
    """
    refused = [event for event in events if event.get("event") == "refused"]
    if not refused:
        return None
    first, times = refused[0], "1 update was" if len(refused) == 1 else f"{len(refused)} updates were"
    return f"{times} refused; the first in round {first.get('round')} from {first.get('silo')}: {first.get('reason')}"
