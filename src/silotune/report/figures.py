"""Figures of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silotune.records import events, read_summary


def rounds_figure(runs: Sequence[Path], path: Path) -> Path:
    """Validation score per round, one panel a silo, one line a run (FedMCP, Figure 3); written as PNG."""
    from matplotlib.figure import Figure

    curves = {run: [event for event in events(run) if event["event"] == "round"] for run in runs}
    silos = list(read_summary(runs[0])["silos"])
    columns = min(3, len(silos))
    rows = -(-len(silos) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for position, panel in enumerate(panels.flat):
        if position >= len(silos):
            panel.set_visible(False)
            continue
        name = silos[position]
        for run, found in curves.items():
            points = [(event["round"], event["validation"].get(name)) for event in found]
            points = [(number, value) for number, value in points if value is not None]
            label = read_summary(run)["method"]
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.4, label=label)
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.3)
        panel.set_xlabel("round")
        panel.set_ylabel("validation score (%)")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    return path
