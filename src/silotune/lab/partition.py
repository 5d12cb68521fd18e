"""Divide a data set among silos as a run would, and show how many rows of each label every silo gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from silotune.config.keys import Keys
from silotune.core.notebook import html_table
from silotune.data.loading import load_silos
from silotune.data.rows import SiloData
from silotune.errors import InputError
from silotune.lab.report.drawing import heatmap
from silotune.runs.build.resolve import read_config

if TYPE_CHECKING:
    import pandas

_MOST_LABELED_SILOS = 30
"""Number of silos up to which every cell of the heatmap shows its count."""


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
        tuple(silos[0].task.labels) if silos[0].task.rules.one_label else ("rows",),
        _label_counts(silos),
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
        """The number of training rows of all silos."""
        return sum(map(sum, self.counts.values()))

    @property
    def title(self) -> str:
        """Describe the partition in one line."""
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
        """Draw the counts as a heatmap of silos and labels into a PNG file."""
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure

        names, picture = list(self.counts), checked_picture(Path(path))
        table = [*zip(*self.counts.values(), strict=True)]
        show_counts = len(names) <= _MOST_LABELED_SILOS
        width = min(16.0, max(5.0, 1.8 + (0.55 if show_counts else 0.13) * len(names)))
        figure = Figure(figsize=(width, 1.6 + 0.5 * len(self.labels)), layout="constrained")
        panel = figure.subplots()
        # square-root scale: on a linear one, a single large silo makes all others look empty
        norm = PowerNorm(0.5, vmin=0, vmax=max(1, *map(max, table)))
        text = "{:.0f}".format if show_counts else None
        image = heatmap(panel, table, self.labels, names, text, aspect="auto", cmap="Blues", norm=norm)
        step = -(-len(names) // _MOST_LABELED_SILOS)
        panel.set_xticks(range(0, len(names), step), names[::step], rotation=90)
        panel.set_xlabel("silo")
        panel.set_ylabel("label")
        figure.colorbar(image, ax=panel, label="training rows")
        figure.savefig(picture, dpi=150)
        return picture

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
        return html_table(self.title, ["silo", *self.labels, "rows"], self.texts())


def checked_picture(path: Path) -> Path:
    """Return a path for a picture after checking that it is a .png file in a folder that exists."""
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise InputError(f"--out {path}: must be a .png file in a folder that exists")
    return path


def _label_counts(silos: Sequence[SiloData]) -> dict[str, tuple[int, ...]]:
    """Count training rows per silo and label; per silo where rows do not have one label each."""
    counts = {}
    for silo in silos:
        numbers = [0] * (len(silo.task.labels) if silo.task.rules.one_label else 1)
        for row in silo.splits.train:
            numbers[row.label] += 1
        counts[silo.name] = tuple(numbers)
    return counts
