"""`run_warnings`: what a run warns of before its first round: its rows, and a head that reads the wrong token."""

from __future__ import annotations

from collections.abc import Sequence

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
