"""FedDPA's measures of finished runs (own task, all tasks, unseen tasks), as tables and figures.

The paper calls the score of a silo's model on its own task's test rows personalization, and the mean of its scores on
the test rows of every task of the federation test-time personalization (FedDPA, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silotune.core.numeric import mean_ignoring_none
from silotune.data.metrics import lower_is_better
from silotune.errors import InputError
from silotune.lab.report.entries import FinishedRun, ReportEntry, silo_names
from silotune.lab.report.scores import metric_name, over_seeds
from silotune.lab.report.tables_by_method import MOST_SILOS, ResultTable, ranked_cells
from silotune.runs.scores import AVERAGE, metrics_of

MEASURES = {"personalization": "personalization", "test_time": "test-time personalization"}
"""Both measures: key in a silo's summary and in evaluation events → title."""

ACCURACIES = {
    "accuracy": "personalization, accuracy of tasks with options",
    "test_time_accuracy": "test-time personalization, accuracy of tasks with options",
}
"""Further measures, as `MEASURES`; their tables are made if the runs have them."""


def measure_tables(entries: Sequence[ReportEntry], ddof: int = 1) -> list[ResultTable]:
    """Make one table per measure: rows are methods, columns silos and their average (the papers' Tables 1, 2 and 8).

    The average is over the silos that took part (appendix A.1). With more than `MOST_SILOS` silos there is a column per
    task instead, averaged over its silos that took part.
    """
    for entry in entries:
        for run in entry.runs:
            if any("test_time" not in silo for silo in run.summary["silos"].values()):
                raise InputError(f"{run.folder}: was not judged on all tasks; run it with evaluation.test_time=true")
    silos = silo_names(entries)
    one_column_per_silo = len(silos) <= MOST_SILOS
    columns = silos if one_column_per_silo else _tasks(entries)
    keys = {key for entry in entries for run in entry.runs for silo in run.summary["silos"].values() for key in silo}
    measures = MEASURES | {key: title for key, title in ACCURACIES.items() if "test_time_accuracy" in keys}
    tables = []
    for key, title in measures.items():

        def read(run: FinishedRun, column: str, key: str = key) -> float | None:
            silos_of_run = run.summary["silos"]
            if column == AVERAGE and len(metrics_of(run.summary)) > 1:
                return None  # a mean of unlike metrics says nothing
            if one_column_per_silo and column != AVERAGE:
                return silos_of_run[column].get(key) if column in silos_of_run else None
            return mean_ignoring_none(
                silo.get(key)
                for name, silo in silos_of_run.items()
                if silo.get("sampled", True) and column in (AVERAGE, run.summary["tasks"][name]["name"])
            )

        tables.append(_table(f"{title} (%)", [*columns, AVERAGE], entries, read, ddof))
    return tables


def _tasks(entries: Sequence[ReportEntry]) -> list[str]:
    """Return all tasks of all runs' silos, in order of appearance."""
    names = [task["name"] for entry in entries for run in entry.runs for task in run.summary["tasks"].values()]
    return list(dict.fromkeys(names))


def unseen_table(entries: Sequence[ReportEntry], ddof: int = 1) -> ResultTable | None:
    """Make the table of average and maximum over silos on unseen tasks (Table 14); None without such tasks."""
    names = list(dict.fromkeys(n for entry in entries for run in entry.runs for n in run.summary.get("unseen", {})))
    if not names:
        return None

    def read(run: FinishedRun, column: str) -> float | None:
        name, _, kind = column.rpartition(" ")
        scores: Mapping[str, Any] = run.summary.get("unseen", {}).get(name, {})
        return scores.get({"AVG": "average", "MAX": "maximum"}[kind])

    columns = [f"{name} {kind}" for name in names for kind in ("AVG", "MAX")]
    return _table("tasks left out of training (%)", columns, entries, read, ddof)


def _table(
    title: str,
    columns: list[str],
    entries: Sequence[ReportEntry],
    read: Callable[[FinishedRun, str], float | None],
    ddof: int,
) -> ResultTable:
    lower = lower_is_better(metric_name(entries[0], AVERAGE))
    table = []
    for column in columns:
        values = [[value for run in entry.runs if (value := read(run, column)) is not None] for entry in entries]
        table.append(ranked_cells(entries, [over_seeds(of_entry, ddof) for of_entry in values], lower))
    rows = [(entry.label, [cells[number] for cells in table]) for number, entry in enumerate(entries)]
    return ResultTable(title, columns, rows)


def silo_task_heatmap(entries: Sequence[ReportEntry], path: Path) -> Path:
    """Draw scores per silo and task, one panel per row of the table, means over seeds.

    Args:
        entries: rows of the table.
        path: the PNG file.

    Returns:
        `path`.
    """
    from matplotlib.figure import Figure

    matrices = [_scores_by_silo_and_task(entry) for entry in entries]
    shared_labels = len({(*silos, "", *tasks) for silos, tasks, _ in matrices}) == 1  # label only the outer panels
    columns = min(3, len(entries))
    rows = -(-len(entries) // columns)
    figure = Figure(figsize=(3.9 * columns + 1.2, 3.3 * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=shared_labels, sharey=shared_labels)
    for panel in panels.flat[len(entries) :]:
        panel.set_visible(False)
    for position, (panel, entry, (silos, tasks, values)) in enumerate(
        zip(panels.flat, entries, matrices, strict=False)
    ):
        shown = [[math.nan if value is None else value for value in row] for row in values]
        image = panel.imshow(shown, vmin=0, vmax=100, cmap="Blues", aspect="auto")
        panel.set_xticks(range(len(tasks)), labels=tasks, rotation=60, ha="right", rotation_mode="anchor")
        panel.set_yticks(range(len(silos)), labels=silos)
        panel.tick_params(
            labelbottom=not shared_labels or position + columns >= len(entries),
            labelleft=not shared_labels or position % columns == 0,
        )
        for row, column in ((r, c) for r in range(len(silos)) for c in range(len(tasks))):
            value = values[row][column]
            if value is not None:
                color = "white" if value > 60 else "black"
                panel.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=color)
        panel.set_title(entry.label, fontsize=10)
    figure.supxlabel("task")
    figure.supylabel("silo's model")
    figure.colorbar(image, ax=panels, shrink=0.7)
    figure.savefig(path, dpi=150)
    return path


def _scores_by_silo_and_task(entry: ReportEntry) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Return silos, tasks, and the score of each pair (mean over seeds)."""
    silos = silo_names([entry])
    tasks = list(entry.first.summary["silos"][silos[0]]["on_tasks"])
    scores = [
        [mean_ignoring_none(run.summary["silos"][silo]["on_tasks"][task] for run in entry.runs) for task in tasks]
        for silo in silos
    ]
    return silos, tasks, scores


def rounds_figure(entries: Sequence[ReportEntry], path: Path) -> Path | None:
    """Draw both measures over rounds, means over silos and seeds (Figure 3).

    Args:
        entries: rows of the table.
        path: the PNG file.

    Returns:
        `path`, or None if no run logged the measures.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    drawn = False
    for panel, (key, title) in zip(figure.subplots(1, 2), MEASURES.items(), strict=True):
        for entry in entries:
            points: dict[int, list[float | None]] = {}
            for run in entry.runs:
                for event in run.events_of("evaluation"):
                    points.setdefault(int(event["round"]), []).append(mean_ignoring_none(event[key].values()))
            if points:
                drawn = True
                panel.plot(
                    list(points),
                    [mean_ignoring_none(values) for values in points.values()],
                    marker="o",
                    label=entry.label,
                )
        panel.set_title(f"{title} (%)", fontsize=10)
        panel.set_xlabel("round")
        panel.grid(alpha=0.3)
    if not drawn:
        return None
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path
