"""`label_shares_figure`: the shares of labels among every silo's training rows (`silotune data --picture`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.core.notebook import COLORS, wrap_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LABELS = 10
"""Labels of a task that have a color of their own; the rarer ones share the last."""

_OTHERS = "all others"

LabelRows = Mapping[str, Mapping[str, int]]
"""Silo → label → training rows."""


def label_shares_figure(tasks: Mapping[str, LabelRows], path: Path) -> Path:
    """Draw a bar for every silo, divided by label; silos of one task stand together, as their labels are the same.

    Args:
        tasks: task → silo → label → training rows.
        path: the PNG or SVG file.

    Returns:
        `path`.
    """
    from matplotlib.figure import Figure

    heights = [1.1 + 0.34 * len(silos) for silos in tasks.values()]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (task, silos) in zip(panels, tasks.items(), strict=True):
        _draw_task(axes, task, silos)
    panels[-1].set_xlabel("share of the training rows (%)", fontsize=9)
    figure.savefig(path, dpi=150)
    return path


def _draw_task(axes: Axes, task: str, silos: LabelRows) -> None:
    totals: dict[str, int] = {}
    for counts in silos.values():
        for label, number in counts.items():
            totals[label] = totals.get(label, 0) + number
    frequent = sorted(totals, key=lambda label: -totals[label])
    shown = frequent if len(frequent) <= _MOST_LABELS else frequent[: _MOST_LABELS - 1]
    left = [0.0] * len(silos)
    for number, label in enumerate([*shown, *([_OTHERS] if len(shown) < len(frequent) else [])]):
        labels = [label] if label != _OTHERS else frequent[len(shown) :]
        shares = [
            100 * sum(counts.get(one, 0) for one in labels) / max(1, sum(counts.values())) for counts in silos.values()
        ]
        color = COLORS[number % len(COLORS)]
        axes.barh(range(len(silos)), shares, left=left, height=0.7, label=label, color=color, edgecolor="white")
        for row, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 6:
                axes.text(start + share / 2, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color="white")
        left = [start + share for start, share in zip(left, shares, strict=True)]
    names = [f"{wrap_label(name)} ({sum(counts.values()):,})" for name, counts in silos.items()]
    axes.set_yticks(range(len(silos)), labels=names, fontsize=8)
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_title(task, fontsize=10, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
