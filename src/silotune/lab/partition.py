"""`partition` divides a setting's rows as a run would, for Python and `silotune partition`; `PartitionResult`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from silotune.config.keys import Keys
from silotune.core.notebook import html_table
from silotune.data.loading import load_silos
from silotune.errors import InputError
from silotune.lab.report.partition_heatmap import label_counts, partition_figure
from silotune.runs.build.resolve import read_config

if TYPE_CHECKING:
    import pandas


def partition(source: str, *overrides: str, **keys: Unpack[Keys]) -> PartitionResult:
    """Divide a setting's data set among silos, before any training: `partition("sentiment5", partition="dirichlet")`.

    Args:
        source: preset name or path of a YAML file; empty: the keys alone.
        overrides: `key=value` words.
        keys: keys of the configuration; a group of keys is a dictionary.
    """
    config = read_config(source, overrides, (), **keys)
    if config.partition.name == "none":
        raise InputError(
            "partition: this setting's silos are given, nothing is divided; choose one, e.g. partition=dirichlet "
            "(allowed: iid, dirichlet, quantity, shards, column)"
        )
    silos = load_silos(config)
    splits = silos[0].splits.counts()
    return PartitionResult(
        config.partition.model_dump(mode="json"),
        tuple(silos[0].task.labels) if silos[0].task.kind == "classification" else ("rows",),
        {name: tuple(row) for name, row in label_counts(silos).items()},
        splits["validation"],
        splits["test"],
    )


@dataclass(frozen=True, repr=False)
class PartitionResult:
    """How many training rows each silo has of each label.

    Attributes:
        settings: the section `partition` of the configuration.
        labels: the label names; `rows` where rows have none.
        counts: silo → training rows of each label.
        validation: validation rows, of all silos together.
        test: test rows, of all silos together.
    """

    settings: Mapping[str, Any]
    labels: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    validation: int
    test: int

    @property
    def rows(self) -> int:
        """All training rows."""
        return sum(map(sum, self.counts.values()))

    @property
    def title(self) -> str:
        """The partition in words."""
        return f"{self.settings['name']}: {self.rows:,} training rows in {len(self.counts)} silos"

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        silos = {
            name: {"rows": sum(row), "labels": dict(zip(self.labels, row, strict=True))}
            for name, row in self.counts.items()
        }
        return {
            "partition": dict(self.settings),
            "rows": self.rows,
            "labels": list(self.labels),
            "silos": silos,
            "validation": self.validation,
            "test": self.test,
        }

    def to_pandas(self) -> pandas.DataFrame:
        """Return the counts: a row for every silo, a column for every label."""
        import pandas

        return pandas.DataFrame.from_dict(self.counts, orient="index", columns=list(self.labels))

    def plot(self, path: str | Path) -> Path:
        """Draw the counts as a heatmap into a PNG file."""
        return partition_figure(self.counts, self.labels, checked_picture(Path(path)))

    def texts(self) -> list[list[str]]:
        """Return the counts as texts: a row for each silo, which begins with its name and ends with its sum."""
        return [[name, *(f"{number:,}" for number in (*row, sum(row)))] for name, row in self.counts.items()]

    def __repr__(self) -> str:
        sizes = [sum(row) for row in self.counts.values()]
        return (
            f"PartitionResult: {self.title}, {min(sizes):,} to {max(sizes):,} each;\n"
            f"for all together {self.validation:,} validation and {self.test:,} test rows"
        )

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        return html_table(self.title, ["silo", *self.labels, "rows"], self.texts())


def checked_picture(path: Path) -> Path:
    """Return the path of a PNG file to write."""
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise InputError(f"--out {path}: must be a .png file in a folder that exists")
    return path
