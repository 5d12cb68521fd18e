"""Write a report as one HTML page that works offline, made by Jinja from `templates/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.errors import InputError
from silotune.lab.report.drawing import FigureSpec, line_style, panel_svg, save_figure
from silotune.lab.report.entries import FinishedRun
from silotune.lab.report.figures import report_figures
from silotune.lab.report.frame import Results
from silotune.lab.report.significance import NOTE, paired_tests
from silotune.lab.report.statements import attack_statement, list_caveats, privacy_statement, traffic_statement
from silotune.lab.report.tables import (
    BASELINE_NOTE,
    COST_NOTE,
    INTERVAL_NOTE,
    ResultTable,
    classes_table,
    confusions,
    cost_table,
    metrics_table,
    plain_table,
    privacy_table,
    rows_table,
    runs_table,
    score_table,
)
from silotune.runs.scores import silo_metric

_MOST_NAMED = 12
"""Silos that the head of the page names."""


def write_report(results: Results, path: Path, title: str = "") -> Path:
    """Write the page, and beside it a folder `figures` with every figure as PNG and SVG; return the page's path.

    A title is made from the labels of the entries where none is given.
    """
    if not results.entries:
        raise InputError("report: no runs given")
    specs = report_figures(results)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent / "figures"
        folder.mkdir(exist_ok=True)
        for spec in specs:
            save_figure(spec, folder)
        write_text(path, render_page(results, specs, title))
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written ({error.strerror})") from error
    return path


def render_page(results: Results, specs: Sequence[FigureSpec], title: str = "") -> str:
    """Return the page's HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("silotune.lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["color"] = lambda position: line_style(position)["color"]
    environment.filters["drawn"] = panel_svg
    return environment.get_template("page.html").render(_content(results, specs, title))


def _content(results: Results, specs: Sequence[FigureSpec], title: str) -> dict[str, Any]:
    """Return the variables of the template."""
    entries, scores = results.entries, score_table(results)
    return {
        "title": title or _title(results),
        "facts": _facts(results),
        "warnings": list_caveats(results),
        "scores": scores,
        "score_notes": [INTERVAL_NOTE, *([BASELINE_NOTE] if len(scores.rows) > len(entries) else [])],
        "tests": _tests(results),
        "test_note": NOTE,
        "silos": results.silos,
        "silo_rows": rows_table(results),
        "classes": classes_table(results),
        "confusions": confusions(results),
        "metrics": [(entry.label, table) for entry in entries if (table := metrics_table(entry.first))],
        "costs": cost_table(results),
        "cost_note": COST_NOTE,
        "figures": [spec for spec in specs if not _is_wide(spec)],
        "wide_figures": [spec for spec in specs if _is_wide(spec)],
        "traffic": [(entry.label, traffic_statement(entry)) for entry in entries],
        "privacy": [(entry.label, privacy_statement(entry)) for entry in entries],
        "privacy_table": privacy_table(results),
        "attacks": [(entry.label, attack_statement(entry, results)) for entry in entries],
        "runs": runs_table(results),
        "configurations": [
            (entry.label, (entry.first.folder / "config.yaml").read_text(encoding="utf-8")) for entry in entries
        ],
    }


def _is_wide(spec: FigureSpec) -> bool:
    """Whether a figure takes the page's whole width; the others stand in columns."""
    return len(spec.panels) + len(spec.further) > 2


def _title(results: Results) -> str:
    labels = [entry.label for entry in results.entries]
    if len(labels) > 5:
        return f"{len(labels)} methods over {len(results.silos)} silos"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _facts(results: Results) -> dict[str, object]:
    silos, runs = results.silos, results.runs
    metrics = {silo_metric(run.summary, name): None for run in runs for name in run.summary["silos"]}
    return {
        "setting": runs[0].config.get("description") or "the user's own files",
        "silos": f"{len(silos)}: {', '.join(silos[:_MOST_NAMED])}{' …' if len(silos) > _MOST_NAMED else ''}",
        "metric": ", ".join(metrics),
        "backbone": _values(runs, lambda run: run.summary["backbone"]),
        "rounds": _values(runs, lambda run: run.summary.get("rounds", "?")),
        "seeds": _values(runs, lambda run: run.seed),
        "precision": _values(runs, lambda run: run.summary.get("precision", "?")),
        "runs": len(runs),
    }


def _values(runs: Sequence[FinishedRun], read: Callable[[FinishedRun], object]) -> str:
    """Read a fact from every run, and list its distinct values."""
    values = sorted({read(run) for run in runs}, key=lambda value: (str(type(value)), value))
    return ", ".join(map(str, values))


def _tests(results: Results) -> ResultTable | None:
    """Make the table of the paired tests; None if nothing can be paired."""
    rows = [(f"{pair.best} − {pair.other}", pair.numbers) for pair in paired_tests(results)]
    header = ["difference (points)", "pairs", "differ", "p (Holm)"]
    title = f"the best average{' of each data set' if len(results.parts) > 1 else ''} against the others"
    return plain_table(title, header, rows, "methods") if rows else None
