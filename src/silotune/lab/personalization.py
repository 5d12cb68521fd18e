"""FedDPA's measures of finished runs (own task, all tasks, unseen tasks), as tables and figures.

The paper calls the score of a silo's model on its own task's test rows personalization, and the mean of its scores on
the test rows of every task of the federation test-time personalization (FedDPA, section 3.1).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.core.numeric import mean_ignoring_none
from silotune.errors import InputError
from silotune.lab.report.drawing import heatmap
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.frame import Results, over_seeds
from silotune.lab.report.tables import MOST_SILOS, ResultTable, ranked_cells
from silotune.runs.scores import AVERAGE, metrics_of

if TYPE_CHECKING:
    import pandas

MEASURES = {"personalization": "personalization", "test_time": "test-time personalization"}
"""Both measures: key in a silo's summary and in evaluation events → title."""

_ACCURACIES = {
    "accuracy": "personalization, accuracy of tasks with options",
    "test_time_accuracy": "test-time personalization, accuracy of tasks with options",
}
"""Further measures; their tables are made if the runs have them."""


def measure_tables(results: Results) -> list[ResultTable]:
    """Make one table per measure: rows are methods, columns silos and their average (the papers' Tables 1, 2 and 8).

    The average is over the silos that took part (appendix A.1). With more than `MOST_SILOS` silos there is a column per
    task instead, averaged over its silos that took part. There is no average of unlike metrics.
    """
    import pandas

    for run in results.runs:
        if any("test_time" not in silo for silo in run.summary["silos"].values()):
            raise InputError(f"{run.folder}: was not judged on all tasks; run it with evaluation.test_time=true")
    frame = pandas.DataFrame(
        {"label": entry.label, "run": number, "silo": name, "task": run.summary["tasks"][name]["name"]}
        | {"sampled": silo.get("sampled", True), "averaged": len(metrics_of(run.summary)) <= 1}
        | {key: silo.get(key) for key in (*MEASURES, *_ACCURACIES)}
        for entry in results.entries
        for number, run in enumerate(entry.runs)
        for name, silo in run.summary["silos"].items()
    )
    taking_part = frame[frame["sampled"]]
    by_silo = len(results.silos) <= MOST_SILOS
    columns = frame.assign(column=frame["silo"]) if by_silo else taking_part.assign(column=taking_part["task"])
    averages = taking_part[taking_part["averaged"]].assign(column=AVERAGE)
    names = [*(results.silos if by_silo else dict.fromkeys(frame["task"])), AVERAGE]
    measures = MEASURES | (_ACCURACIES if frame["test_time_accuracy"].notna().any() else {})
    both = pandas.concat([columns, averages])
    return [_table(f"{title} (%)", names, results, both, key) for key, title in measures.items()]


def unseen_table(results: Results) -> ResultTable | None:
    """Make the table of average and maximum over silos on unseen tasks (Table 14); None without such tasks."""
    import pandas

    frame = pandas.DataFrame(
        {"label": entry.label, "run": number, "column": f"{name} {kind}", "value": scores[key]}
        for entry in results.entries
        for number, run in enumerate(entry.runs)
        for name, scores in run.summary.get("unseen", {}).items()
        for kind, key in (("AVG", "average"), ("MAX", "maximum"))
    )
    if frame.empty:
        return None
    return _table("tasks left out of training (%)", [*frame["column"].unique()], results, frame, "value")


def _table(title: str, columns: list[str], results: Results, frame: pandas.DataFrame, key: str) -> ResultTable:
    """Make the table of one measure: the mean of every run in every column, over seeds."""
    means = frame.dropna(subset=[key]).groupby(["column", "label", "run"])[key].agg(statistics.fmean)
    by_cell = means.groupby(["column", "label"]).agg(list).to_dict()
    lower, table = results.lower(AVERAGE), []
    for column in columns:
        values = [by_cell.get((column, entry.label), []) for entry in results.entries]
        table.append(ranked_cells(results, [over_seeds(scores, results.ddof) for scores in values], lower))
    rows = [(entry.label, [cells[number] for cells in table]) for number, entry in enumerate(results.entries)]
    return ResultTable(title, columns, rows)


def silo_task_heatmap(entries: Sequence[ReportEntry], path: Path) -> Path:
    """Draw the score of every silo's model on every task, means over seeds, one panel per entry, into a PNG file."""
    from matplotlib.figure import Figure

    columns = min(3, len(entries))
    rows = -(-len(entries) // columns)
    figure = Figure(figsize=(3.9 * columns + 1.2, 3.3 * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat[len(entries) :]:
        panel.set_visible(False)
    for panel, entry in zip(panels.flat, entries, strict=False):
        by_run = [run.summary["silos"] for run in entry.runs]
        silos = list(by_run[0])
        tasks = list(by_run[0][silos[0]]["on_tasks"])
        means = [[mean_ignoring_none(of[silo]["on_tasks"][task] for of in by_run) for task in tasks] for silo in silos]
        table = [[float("nan") if value is None else value for value in row] for row in means]
        image = heatmap(panel, table, silos, tasks, "{:.0f}".format, vmin=0, vmax=100, cmap="Blues", aspect="auto")
        panel.tick_params(axis="x", rotation=60)
        panel.set_title(entry.label, fontsize=10)
    figure.supxlabel("task")
    figure.supylabel("silo's model")
    figure.colorbar(image, ax=panels, shrink=0.7)
    figure.savefig(path, dpi=150)
    return path


def rounds_figure(entries: Sequence[ReportEntry], path: Path) -> Path | None:
    """Draw both measures over rounds, means over silos and seeds (Figure 3), as PNG; None if no run logged them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    for panel, (key, title) in zip(figure.subplots(1, 2), MEASURES.items(), strict=True):
        for entry in entries:
            points: dict[int, list[float | None]] = {}
            for event in (event for run in entry.runs for event in run.events_of("evaluation")):
                points.setdefault(int(event["round"]), []).append(mean_ignoring_none(event[key].values()))
            if points:
                means = [mean_ignoring_none(values) for values in points.values()]
                panel.plot(list(points), means, marker="o", label=entry.label)
        panel.set_title(f"{title} (%)", fontsize=10)
        panel.set_xlabel("round")
        panel.grid(alpha=0.3)
    if not figure.axes[0].lines:
        return None
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path
