"""Draw the coordinator's labeled rows for FedFAME, and take the labels from silos' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from silotune.core.randomness import sampler
from silotune.data.rows import Row, SiloData, Splits
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.config.coordinator import ServerConfig

NO_LABEL = -1
"""Label of rows without one; it is no class index, so a loss that uses it fails."""


def without_labels(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without label and answer."""
    return [replace(row, label=NO_LABEL, answer="") for row in rows]


def draw_labeled_rows(data: Sequence[SiloData], server: ServerConfig, seed: int) -> SiloData:
    """Draw the coordinator's labeled rows from all silos' training rows, balanced by label.

    The silos keep the drawn rows. The draw depends on the rows and the seed, but not on their division among silos.
    """
    task = data[0].task
    task_names = sorted({silo.task.name for silo in data})
    if len(task_names) > 1 or task.kind != "classification":
        raise InputError(f"server: labeled rows are of one classification task, found {', '.join(task_names)}")
    if server.labels_per_class is None and server.labelled_rows is None:
        raise InputError("server.labels_per_class: say how many labeled rows of each label the coordinator has")
    chosen: list[Row] = []
    rows = sorted((row for silo in data for row in silo.splits.train), key=lambda row: (row.label, row.texts))
    for label, name in enumerate(task.labels):
        of_label = [row for row in rows if row.label == label]
        each, more = divmod(server.labelled_rows or 0, len(task.labels))
        wanted = server.labels_per_class or each + (label < more)
        if wanted > len(of_label):
            key = "labels_per_class" if server.labels_per_class else "labelled_rows"
            raise InputError(
                f"server.{key}: {wanted} rows of label {name!r} are asked for, but there are only {len(of_label)}"
            )
        chosen += sampler(seed, "labelled", name).sample(of_label, wanted)
    return SiloData("coordinator", task, Splits(train=chosen))
