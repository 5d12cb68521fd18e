"""`write_report`: one HTML page that works offline, with tables, figures, caveats, configurations."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from silotune.core.files import write_text
from silotune.errors import InputError
from silotune.experiments.report.baseline_rows import NOTE as BASELINE_NOTE
from silotune.experiments.report.caveats import describe_sent_parts, list_caveats
from silotune.experiments.report.entries import FinishedRun, ReportEntry, silo_names
from silotune.experiments.report.figures import report_figures
from silotune.experiments.report.scores import average_text
from silotune.experiments.report.significance import NOTE, heading, paired_tests
from silotune.experiments.report.silo_tables import classes_table, metrics_table, rows_table
from silotune.experiments.report.stylesheet import CSS
from silotune.experiments.report.svg import FigureSpec, line_style, panel_svg, save_figure
from silotune.experiments.report.tables_by_method import (
    COST_NOTE,
    ResultTable,
    TableCell,
    as_html,
    cost_table,
    score_table,
)


def write_report(entries: Sequence[ReportEntry], path: Path, *, ddof: int = 1, title: str = "") -> Path:
    """Write the page, and beside it a folder `figures` with every figure as PNG and SVG.

    Args:
        entries: the entries of the report, see `read_entries`.
        path: the HTML file, replaced atomically.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
        title: the title of the page; if empty, it is made from the labels of the entries.

    Returns:
        `path`.

    Raises:
        InputError: there are no rows, or the files cannot be written.
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
    title = html.escape(title or _title(entries))
    sections = [
        f"<header><h1>{title}</h1>{_overview(entries)}</header>",
        _warnings(entries),
        _section("results", "Results", _scores(entries, ddof) + _significance(entries)),
        _section("silos", "Silos", _silos(entries)),
        _section("costs", "Parameters and communication", as_html(cost_table(entries)) + _paragraph(COST_NOTE)),
        f'<div class="figures">{"".join(_figure(spec) for spec in specs)}</div>' if specs else "",
        _section("left", "What left the silos", _sent_parts(entries)),
        _section("privacy", "Privacy", _privacy(entries)),
        _section("runs", "Runs", as_html(_runs(entries))),
        _section("config", "Configuration", _configs(entries)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _title(entries: Sequence[ReportEntry]) -> str:
    labels = [entry.label for entry in entries]
    if len(labels) > 5:
        return f"{len(labels)} methods over {len(silo_names(entries))} silos"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _overview(entries: Sequence[ReportEntry]) -> str:
    first, silos = entries[0].first, silo_names(entries)
    runs = [run for entry in entries for run in entry.runs]
    facts = {
        "setting": first.config.get("description") or "the user's own files",
        "silos": f"{len(silos)}: {', '.join(silos[:12])}{' …' if len(silos) > 12 else ''}",
        "backbone": _values(runs, lambda run: run.summary["backbone"]),
        "rounds": _values(runs, lambda run: run.summary.get("rounds", "?")),
        "seeds": _values(runs, lambda run: run.seed),
        "precision": _values(runs, lambda run: run.summary.get("precision", "?")),
        "runs": len(runs),
    }
    items = "".join(f"<dt>{name}</dt><dd>{html.escape(str(value))}</dd>" for name, value in facts.items())
    return f"<dl>{items}</dl>"


def _values(runs: Sequence[FinishedRun], read: Callable[[FinishedRun], object]) -> str:
    """Read a fact from every run, and list its distinct values."""
    values = sorted({read(run) for run in runs}, key=lambda value: (str(type(value)), value))
    return ", ".join(map(str, values))


def _section(name: str, title: str, body: str, kind: str = "") -> str:
    css_class = f' class="{kind}"' if kind else ""
    return f'<section id="{name}"{css_class}><h2>{html.escape(title)}</h2>{body}</section>' if body else ""


def _paragraph(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _warnings(entries: Sequence[ReportEntry]) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in list_caveats(entries))
    return f'<section id="warnings" class="warnings"><h2>Warnings</h2><ul>{items}</ul></section>' if items else ""


def _scores(entries: Sequence[ReportEntry], ddof: int) -> str:
    table = score_table(entries, ddof)
    return as_html(table) + (_paragraph(BASELINE_NOTE) if len(table.rows) > len(entries) else "")


def _silos(entries: Sequence[ReportEntry]) -> str:
    """Render the silos' rows and baselines, and below them every method's test rows in all metrics and per label."""
    rows = rows_table(entries)
    blocks = [as_html(rows)] if rows else []
    for entry in entries:
        tables = [table for table in (metrics_table(entry.first), classes_table(entry.first)) if table]
        if tables:
            body = "".join(map(as_html, tables))
            title = f"{html.escape(entry.label)}: all metrics, per label"
            blocks.append(f"<details><summary>{title}</summary>{body}</details>")
    return "".join(blocks)


def _significance(entries: Sequence[ReportEntry]) -> str:
    tests = paired_tests(entries)
    if not tests:
        return ""
    rows = [
        (
            f"{pair.best} − {pair.other}",
            [TableCell(f"{pair.difference:+.2f}"), TableCell(str(pair.pairs)), TableCell(f"{pair.p:.3g}")],
        )
        for pair in tests
    ]
    table = ResultTable(heading(entries), ["difference (points)", "pairs", "p (Holm)"], rows)
    return as_html(table) + _paragraph(NOTE)


def _figure(spec: FigureSpec) -> str:
    chips = "".join(
        f'<li><span style="background:{line_style(n)["color"]}"></span>{html.escape(label)}</li>'
        for n, label in enumerate(spec.legend)
    )
    legend = f'<ul class="legend">{chips}</ul>' if len(spec.legend) > 1 else ""
    panels = "".join(
        f'<div class="panel">{panel_svg(panel, f"{spec.name}{number}")}</div>'
        for number, panel in enumerate(spec.panels)
    )
    kind = "panels" if len(spec.panels) > 1 else "single"
    caption = f"<figcaption>{html.escape(spec.caption)}</figcaption>"
    body = f'<figure>{legend}<div class="{kind}">{panels}</div>{caption}</figure>'
    return _section(spec.name, spec.title, body, "" if kind == "single" else "wide")


def _sent_parts(entries: Sequence[ReportEntry]) -> str:
    items = "".join(
        f"<dt>{html.escape(entry.label)}</dt><dd>{html.escape(describe_sent_parts(entry))}</dd>" for entry in entries
    )
    return f"<dl>{items}</dl>" + _paragraph(
        "Beside parts: the round, the silo's name and, if the silo discloses it, its number of training rows."
    )


def _privacy(entries: Sequence[ReportEntry]) -> str:
    """Render the privacy guarantee of every run with noise."""
    rows, limits = [], dict[str, None]()
    for entry in entries:
        for run in entry.runs:
            if guarantee := run.summary.get("privacy"):
                limits |= dict.fromkeys(
                    [f"The guarantee does not hold against {guarantee['uncovered']}."]
                    if guarantee.get("uncovered")
                    else []
                )
                texts = [
                    run.folder.name,
                    str(guarantee["mechanism"]),
                    f"{guarantee['epsilon_round']:.4g}",
                    f"{guarantee['epsilon_total']:.4g}",
                    f"{guarantee['delta']:g}",
                    str(guarantee["participations"]),
                ]
                rows.append((entry.label, [TableCell(text) for text in texts]))
    header = ["folder", "mechanism", "ε a round", "ε in total", "δ", "participations"]
    table = as_html(ResultTable("differential privacy of every noised run", header, rows)) if rows else ""
    return table + "".join(map(_paragraph, limits))


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


def _configs(entries: Sequence[ReportEntry]) -> str:
    blocks = []
    for entry in entries:
        text = (entry.first.folder / "config.yaml").read_text(encoding="utf-8")
        blocks.append(f"<details><summary>{html.escape(entry.label)}</summary><pre>{html.escape(text)}</pre></details>")
    return "".join(blocks)
