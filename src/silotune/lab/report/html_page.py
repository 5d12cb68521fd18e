"""`write_report`: one HTML page that works offline, made by Jinja of `templates/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.errors import InputError
from silotune.lab.report.baseline_rows import NOTE as BASELINE_NOTE
from silotune.lab.report.caveats import list_caveats
from silotune.lab.report.entries import FinishedRun, ReportEntry, silo_names
from silotune.lab.report.figures import report_figures
from silotune.lab.report.score_intervals import NOTE as INTERVAL_NOTE
from silotune.lab.report.significance import NOTE, heading, paired_tests
from silotune.lab.report.silo_tables import classes_table, confusions, metrics_table, rows_table
from silotune.lab.report.statements import (
    attack_statements,
    privacy_statements,
    privacy_table,
    traffic_statements,
)
from silotune.lab.report.svg import FigureSpec, line_style, panel_svg, save_figure
from silotune.lab.report.tables_by_method import COST_NOTE, ResultTable, TableCell, cost_table, score_table
from silotune.runs.scores import average_text, silo_metric

_MOST_NAMED = 12
"""Silos that the head of the page names."""


def write_report(entries: Sequence[ReportEntry], path: Path, *, ddof: int = 1, title: str = "") -> Path:
    """Write the page, and beside it a folder `figures` with every figure as PNG and SVG.

    Args:
        entries: the entries of the report, see `read_entries`.
        path: the HTML file, replaced atomically.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
        title: the title of the page; if empty, it is made from the labels of the entries.

    Returns:
        `path`.
    """
    if not entries:
        raise InputError("report: no runs given")
    specs = report_figures(entries, ddof)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent / "figures"
        folder.mkdir(exist_ok=True)
        for spec in specs:
            save_figure(spec, folder)
        write_text(path, render_page(entries, specs, ddof, title))
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written ({error.strerror})") from error
    return path


def render_page(entries: Sequence[ReportEntry], specs: Sequence[FigureSpec], ddof: int = 1, title: str = "") -> str:
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
    return environment.get_template("page.html").render(_content(entries, specs, ddof, title))


def _content(entries: Sequence[ReportEntry], specs: Sequence[FigureSpec], ddof: int, title: str) -> dict[str, Any]:
    """Return the variables of the template."""
    scores, names = score_table(entries, ddof), silo_names(entries)
    metrics = [(entry.label, table) for entry in entries if (table := metrics_table(entry.first))]
    notes = [INTERVAL_NOTE, *([BASELINE_NOTE] if len(scores.rows) > len(entries) else [])]
    return {
        "title": title or _title(entries),
        "facts": _facts(entries),
        "warnings": list_caveats(entries),
        "scores": scores,
        "score_notes": notes,
        "tests": _tests(entries),
        "test_note": NOTE,
        "silos": names,
        "silo_rows": rows_table(entries),
        "classes": classes_table(entries),
        "confusions": confusions(entries),
        "metrics": metrics,
        "costs": cost_table(entries),
        "cost_note": COST_NOTE,
        "figures": [spec for spec in specs if not _is_wide(spec)],
        "wide_figures": [spec for spec in specs if _is_wide(spec)],
        "traffic": traffic_statements(entries),
        "privacy": privacy_statements(entries),
        "privacy_table": privacy_table(entries),
        "attacks": attack_statements(entries),
        "runs": _runs(entries),
        "configurations": [
            (entry.label, (entry.first.folder / "config.yaml").read_text(encoding="utf-8")) for entry in entries
        ],
    }


def _is_wide(spec: FigureSpec) -> bool:
    """Whether a figure takes the page's whole width; the others stand in columns."""
    return len(spec.panels) + len(spec.further) > 2


def _title(entries: Sequence[ReportEntry]) -> str:
    labels = [entry.label for entry in entries]
    if len(labels) > 5:
        return f"{len(labels)} methods over {len(silo_names(entries))} silos"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _facts(entries: Sequence[ReportEntry]) -> dict[str, object]:
    first, silos = entries[0].first, silo_names(entries)
    runs = [run for entry in entries for run in entry.runs]
    metrics = {silo_metric(run.summary, name): None for run in runs for name in run.summary["silos"]}
    return {
        "setting": first.config.get("description") or "the user's own files",
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


def _tests(entries: Sequence[ReportEntry]) -> ResultTable | None:
    """Make the table of the paired tests; None if nothing can be paired."""
    rows = [
        (
            f"{pair.best} − {pair.other}",
            [
                TableCell(text)
                for text in (f"{pair.difference:+.2f}", str(pair.pairs), str(pair.differing), f"{pair.p:.3g}")
            ],
        )
        for pair in paired_tests(entries)
    ]
    header = ["difference (points)", "pairs", "differ", "p (Holm)"]
    return ResultTable(heading(entries), header, rows, "methods") if rows else None


def _runs(entries: Sequence[ReportEntry]) -> ResultTable:
    header = ["folder", "seed", "average", "best round", "rounds", "seconds", "rows/s", "state sha256"]
    rows = []
    for entry in entries:
        for run in entry.runs:
            summary = run.summary
            texts = [
                run.folder.name,
                str(run.seed),
                average_text(summary),
                str(summary["best_round"]),
                str(summary.get("rounds", "–")),
                f"{summary['seconds']:.0f}",
                f"{summary.get('samples_per_second', 0):.1f}",
                str(summary.get("state_sha256", "–"))[:12],
            ]
            rows.append((entry.label, [TableCell(text) for text in texts]))
    return ResultTable("every run; rows/s are those of local training", header, rows)
