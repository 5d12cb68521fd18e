"""Semi-supervised federations: a few labeled rows at the coordinator, silos without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from silotune.core.randomness import sampler
from silotune.data.tasks import Row, SiloData, Splits
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.config.server import ServerConfig


NO_LABEL = -1
"""No class has this index: a loss that asks for it fails."""


def without_labels(rows: Sequence[Row]) -> list[Row]:
    """The rows' texts alone."""
    return [replace(row, label=NO_LABEL, answer="") for row in rows]


def draw_labeled_rows(data: Sequence[SiloData], server: ServerConfig, seed: int) -> SiloData:
    """The coordinator's labeled rows: balanced by label, drawn from all silos' training rows, which keep them.

    The draw depends on the rows and the seed, not on how the rows are divided among silos.

    Raises:
        InputError: if their number is not given, a label has too few rows, or silos hold several tasks.
    """
    task = data[0].task
    others = sorted({silo.task.name for silo in data})
    if len(others) > 1 or task.kind != "classification":
        raise InputError(f"server: labeled rows are of one classification task, found {', '.join(others)}")
    if server.labels_per_class is None and server.labelled_rows is None:
        raise InputError("server.labels_per_class: say how many labeled rows of each label the coordinator has")
    chosen: list[Row] = []
    rows = sorted((row for silo in data for row in silo.splits.train), key=lambda row: (row.label, row.texts))
    for label, name in enumerate(task.labels):
        of_label = [row for row in rows if row.label == label]
        wanted = server.labels_per_class or _even_share(server.labelled_rows or 0, label, len(task.labels))
        if wanted > len(of_label):
            key = "labels_per_class" if server.labels_per_class else "labelled_rows"
            raise InputError(
                f"server.{key}: {wanted} rows of label {name!r} are asked for, but there are only {len(of_label)}"
            )
        chosen += sampler(seed, "labelled", name).sample(of_label, wanted)
    return SiloData("coordinator", task, Splits(train=chosen))


def _even_share(total: int, position: int, parts: int) -> int:
    return total // parts + (position < total % parts)
