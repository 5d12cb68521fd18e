"""`--dry-run` of `run` and `compare`: everything is read, built and checked, and nothing trained or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from silotune.cli.console import console, say
from silotune.core.determinism import numerics
from silotune.data.rows import SiloData
from silotune.errors import InputError
from silotune.runs.build.builder import build
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method
from silotune.runs.build.run_warnings import run_warnings
from silotune.runs.summary import parameters

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.experiments.comparison import Cell
    from silotune.models.backbone.backbone import Backbone
    from silotune.training.federation import Federation

_MOST_SILOS = 20
"""Silos that are listed."""

_END = "nothing was trained or written (--dry-run)"


def preview_run(config: Config) -> None:
    """Build a run's federation, and say what would be trained on which rows and what would be sent."""
    rows: list[SiloData] = []
    federation = _built(config, None, rows)
    for line in run_warnings(config, rows):
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
    say(_END)


def preview_comparison(cells: Sequence[Cell]) -> None:
    """Build the first run of every entry of a comparison, and list the entries."""
    from rich.table import Table

    entries: dict[str, list[Cell]] = {}
    for cell in cells:
        entries.setdefault(cell.entry, []).append(cell)
    table = Table("entry", "seeds", *_NUMBERS)
    for number in range(2, 2 + len(_NUMBERS)):
        table.columns[number].justify = "right"
    needs: BackboneRequirements | None = None
    backbone: Backbone | None = None
    for entry, (first, *others) in entries.items():
        required = BackboneRequirements.of(first.config, make_method(first.config))
        try:
            federation = _built(first.config, backbone if required == needs else None, [])
        except InputError as error:
            raise InputError(f"{first.folder}: {error}") from error
        needs, backbone, sizes = required, federation.backbone, parameters(federation)
        counts = (federation.rounds, len(federation.silos), sizes["trainable_parameters"], sizes["sent_parameters"])
        seeds = ", ".join(str(cell.seed) for cell in (first, *others))
        table.add_row(entry, seeds, *(f"{count:,}" for count in counts))
    console.print(table)
    say(f"{len(cells)} runs; {_END}")


_NUMBERS = ("rounds", "silos", "trained parameters", "sent a round")


def _built(config: Config, backbone: Backbone | None, rows: list[SiloData]) -> Federation:
    with numerics(config.precision.deterministic, config.precision.tf32):
        return build(config, backbone, look=rows.extend)
