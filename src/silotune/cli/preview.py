"""Read, build and check everything, and train and write nothing (`--dry-run`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silotune.cli.console import say
from silotune.core.determinism import numerics
from silotune.data.rows import SiloData
from silotune.runs.build.builder import build, run_warnings
from silotune.runs.build.resolve import chosen_defaults
from silotune.runs.summary import parameters

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.training.context import TrainingContext

_MOST_SILOS = 20
"""Silos that are listed."""

END = "nothing was trained or written (--dry-run)"


def preview_run(config: Config) -> None:
    """Build a run's federation, and say what would be trained on which rows and what would be sent."""
    rows: list[SiloData] = []
    warnings: list[str] = []

    def look(silos: list[SiloData], context: TrainingContext, cuts: list[str]) -> None:
        rows.extend(silos)
        warnings.extend(run_warnings(config, silos, context, cuts))

    with numerics(config.precision.deterministic, config.precision.tf32):
        federation = build(config, look=look)
    for line in chosen_defaults(config, federation.config):
        say(line)
    for line in warnings:
        say(f"warning: {line}")
    for silo in rows[:_MOST_SILOS]:
        counts = ", ".join(f"{number:,} {split}" for split, number in silo.splits.counts().items())
        say(f"silo {silo.name}: {counts} rows; task {silo.task.name} by {silo.task.metric}")
    if len(rows) > _MOST_SILOS:
        say(f"… and {len(rows) - _MOST_SILOS} more silos")
    sizes = parameters(federation)
    say(
        f"{config.method.name}, {federation.rounds} rounds: a silo trains {sizes['trainable_parameters']:,} parameters "
        f"and sends {sizes['sent_parameters']:,} a round"
    )
    for line in federation.privacy.lines() if federation.privacy is not None else ():
        say(line)
    say(END)
