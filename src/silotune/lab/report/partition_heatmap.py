"""`label_counts` per silo, and `partition_figure`, their heatmap (`silotune partition`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from silotune.data.rows import SiloData

_MOST_LABELED_SILOS = 30
"""Number of silos up to which every cell shows its count."""


def label_counts(silos: Sequence[SiloData]) -> dict[str, list[int]]:
    """Count training rows per silo and label; per silo where rows do not have one label each."""
    counts = {}
    for silo in silos:
        counts[silo.name] = [0] * (len(silo.task.labels) if silo.task.kind == "classification" else 1)
        for row in silo.splits.train:
            counts[silo.name][row.label] += 1
    return counts


def partition_figure(counts: Mapping[str, Sequence[int]], labels: Sequence[str], path: Path) -> Path:
    """Draw rows per silo (x) and label (y) as a heatmap.

    Args:
        counts: silo to rows per label.
        labels: label names.
        path: the PNG file.

    Returns:
        `path`.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    names = list(counts)
    table = [[counts[name][label] for name in names] for label in range(len(labels))]
    most = max(max(row) for row in table)
    show_counts = len(names) <= _MOST_LABELED_SILOS
    width = min(16.0, max(5.0, 1.8 + (0.55 if show_counts else 0.13) * len(names)))
    figure = Figure(figsize=(width, 1.6 + 0.5 * len(labels)), layout="constrained")
    panel = figure.subplots()
    # square-root scale: on a linear one, a single large silo makes all others look empty
    image = panel.imshow(table, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=max(most, 1)))
    if show_counts:
        for row, numbers in enumerate(table):
            for column, number in enumerate(numbers):
                color = "white" if number > 0.4 * most else "black"
                panel.text(column, row, f"{number}", ha="center", va="center", fontsize=7, color=color)
    step = max(1, -(-len(names) // _MOST_LABELED_SILOS))
    panel.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=8)
    panel.set_yticks(range(len(labels)), labels, fontsize=9)
    panel.set_xlabel("silo")
    panel.set_ylabel("label")
    figure.colorbar(image, ax=panel, label="training rows")
    figure.savefig(path, dpi=150)
    return path
