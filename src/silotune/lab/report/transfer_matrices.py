"""Transfer matrices as CSV and heatmaps: `write_transfer_csv`, `transfer_figure` (`silotune transfer`)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from silotune.lab.report.svg import INK
from silotune.lab.transfer_scores import INFERENCE, OTHER, PARAPHRASE, SENTIMENT, TASK_TYPES, Matrix, TransferScore

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLUMNS = (
    *("source", "target", "metric", "absolute", "relative"),
    *("method", "tuner", "setting", "seed", "majority", "source_type", "target_type"),
    *("source_lr", "target_lr", "source_alpha", "target_alpha"),
)


TYPE_COLORS = {SENTIMENT: "#2563c9", INFERENCE: "#1f8a4c", PARAPHRASE: "#c8323c", OTHER: "#5a6673"}
"""Colors of task types as in the paper's figures (blue, green, red); further types take those of `_MORE_COLORS`."""

_MORE_COLORS = ("#8b62d6", "#b08a10", "#1496a8", "#d1477f", "#758a2e")

_CELL = 0.62  # inches

_LUMINANCE = np.array([0.299, 0.587, 0.114])


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run beside its scores.

    Args:
        majority: score of the most frequent label; None for generation.
        lr: learning rate.
        alpha: alpha of the partition, if it has one.
    """

    majority: float | None
    lr: float
    alpha: float | None


def write_transfer_csv(
    groups: Mapping[str, tuple[str, str, Sequence[TransferScore]]],
    facts: Mapping[tuple[str, str, int], RunFacts],
    path: Path,
    types: Mapping[str, str] = TASK_TYPES,
) -> Path:
    """Write one line per source, target and seed.

    Args:
        groups: label of the group to (method, tuner, scores).
        facts: (label, task, seed) to facts about that run.
        path: the CSV file.
        types: task to type.

    Returns:
        `path`.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for setting, (method, tuner, cells) in groups.items():
            for cell in sorted(cells, key=lambda cell: (cell.source, cell.target, cell.seed)):
                runs = [facts[setting, name, cell.seed] for name in (cell.source, cell.target)]
                writer.writerow(
                    [
                        *(cell.source, cell.target, cell.metric, _number(cell.absolute), _number(cell.relative)),
                        *(method, tuner, setting, cell.seed, _number(runs[1].majority)),
                        *(types.get(name, OTHER) for name in (cell.source, cell.target)),
                        *(f"{run.lr:g}" for run in runs),
                        *("" if run.alpha is None else f"{run.alpha:g}" for run in runs),
                    ]
                )
    return path


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def transfer_figure(matrices: Sequence[Matrix], path: Path) -> Path:
    """Draw one row of heatmaps per matrix: relative and absolute scores.

    Relative scores share one scale centered at 100 (white: as good as the target's own model), absolute scores another.
    Task names have the color of their type.

    Args:
        matrices: the matrices, at least one.
        path: the PNG file.

    Returns:
        `path`.
    """
    from matplotlib.colors import Normalize, TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    most = max(len(matrix.tasks) for matrix in matrices)
    side = _CELL * most
    longest = max(len(task) for matrix in matrices for task in matrix.tasks)
    names = 0.09 * longest
    figure = Figure(
        figsize=(2 * (side + names + 1.9), len(matrices) * (side + names + 1.0) + 0.5), layout="constrained"
    )
    panels = figure.subplots(len(matrices), 2, squeeze=False)
    relative = [value for matrix in matrices for value in matrix.relative.values()]
    absolute = [value for matrix in matrices for value in matrix.absolute.values()]
    reach = max([10.0, *(abs(value - 100) for value in relative)])
    norms = (
        TwoSlopeNorm(100, 100 - reach, 100 + reach),
        Normalize(min(absolute), max(max(absolute), min(absolute) + 1)),
    )
    colors = _colors(matrices)
    for line, matrix in zip(panels, matrices, strict=True):
        seeds = f" (mean of {matrix.seeds} seeds)" if matrix.seeds > 1 else ""
        for panel, values, norm, map_name, quantity in zip(
            line,
            (matrix.relative, matrix.absolute),
            norms,
            ("BrBG", "Purples"),
            ("% of the target's own score", "score (%)"),
            strict=True,
        ):
            _heatmap(panel, matrix, values, norm, map_name, colors)
            panel.set_title(f"{matrix.label}{seeds}: {quantity}", fontsize=9, color=INK, loc="left")
            figure.colorbar(panel.images[0], ax=panel, shrink=0.85).ax.tick_params(labelsize=7)
    handles = [Line2D([], [], marker="s", linestyle="none", color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    return path


def _colors(matrices: Sequence[Matrix]) -> dict[str, str]:
    """Map the types that occur to their colors."""
    kinds = dict.fromkeys(kind for matrix in matrices for kind in matrix.types)
    unnamed = [kind for kind in kinds if kind not in TYPE_COLORS]
    more = {kind: _MORE_COLORS[number % len(_MORE_COLORS)] for number, kind in enumerate(unnamed)}
    return {kind: (TYPE_COLORS | more)[kind] for kind in kinds}


def _heatmap(
    panel: Axes,
    matrix: Matrix,
    values: Mapping[tuple[str, str], float],
    norm: object,
    color_map: str,
    colors: Mapping[str, str],
) -> None:
    tasks = matrix.tasks
    table = [[values.get((source, target), float("nan")) for target in tasks] for source in tasks]
    image = panel.imshow(table, norm=norm, cmap=color_map)  # type: ignore[arg-type]
    shades = image.to_rgba(np.asarray(table))
    for row, numbers in enumerate(table):
        for column, number in enumerate(numbers):
            if np.isnan(number):  # no such pair
                text, dark = "–", False
            else:
                text = f"{number:.0f}" if number >= 99.95 else f"{number:.1f}"
                dark = float(shades[row, column, :3] @ _LUMINANCE) < 0.5
            weight = "bold" if row == column else "normal"
            color = "white" if dark else "black"
            panel.text(column, row, text, ha="center", va="center", fontsize=8, color=color, fontweight=weight)
    for axis, rotation in ((panel.xaxis, 45), (panel.yaxis, 0)):
        axis.set_ticks(range(len(tasks)), tasks, fontsize=8, rotation=rotation)
        for tick, kind in zip(axis.get_ticklabels(), matrix.types, strict=True):
            tick.set_color(colors[kind])
            tick.set_fontweight("bold")
    for position in range(1, len(tasks)):  # lines between types
        if matrix.types[position] != matrix.types[position - 1]:
            panel.axhline(position - 0.5, color=INK, linewidth=1)
            panel.axvline(position - 0.5, color=INK, linewidth=1)
    panel.set_xlabel("target", fontsize=8)
    panel.set_ylabel("source", fontsize=8)
