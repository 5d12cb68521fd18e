"""Write a report as one HTML page that works offline, made by Jinja from `templates/`; its warnings and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.errors import InputError, file_errors
from silotune.lab.report import tables
from silotune.lab.report.alarms import alarms
from silotune.lab.report.drawing import FigureSpec, line_style, panel_svg, save_figure
from silotune.lab.report.entries import FinishedRun, ReportEntry
from silotune.lab.report.figures import report_figures
from silotune.lab.report.frame import MIB, Results
from silotune.lab.report.judging import NOTE, verdict_table
from silotune.lab.report.significance import beaten_by_words, headline
from silotune.methods.parts import Scope, names_with
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.scores import silo_metric
from silotune.runs.storage.readers import read_versions, refusal_warning

_MOST_NAMED = 12
"""Silos that the head of the page names."""

_FEW_ROWS = 100
"""Test rows below which a report warns of a silo."""

_MOST_WARNED = 6
"""Silos that a warning names."""

_EXPECTED_EVENTS = {
    *("silo", "round", "final", "refused", "evaluation", "server", "versions", "cohort", "budget", "stopped"),
    "aggregation",
}
"""Events that need no generic warning (`_warnings_of_run` has specific ones for some)."""

_MEANS = ("samples", "uniform")
"""Aggregations that take every update as it is."""


def write_report(results: Results, path: Path, title: str = "") -> Path:
    """Write the page, and beside it a folder `figures` with every figure as PNG and SVG; return the page's path.

    A title is made from the labels of the entries where none is given.
    """
    if not results.entries:
        raise InputError("report: no runs given")
    specs = report_figures(results)
    with file_errors(f"--out {path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent / "figures"
        folder.mkdir(exist_ok=True)
        for spec in specs:
            save_figure(spec, folder)
        write_text(path, render_page(results, specs, title))
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
    entries, scores = results.entries, tables.score_table(results)
    return {
        "title": title or _title(results),
        "headline": headline(results),
        "facts": _facts(results),
        "warnings": list_caveats(results),
        "scores": scores,
        "score_notes": [tables.INTERVAL_NOTE, *tables.baseline_notes(results, scores)],
        "tests": verdict_table(results),
        "test_note": NOTE,
        "silos": results.silos,
        "silo_rows": tables.rows_table(results),
        "classes": tables.classes_table(results),
        "confusions": tables.confusions(results),
        "metrics": [(entry.label, table) for entry in entries if (table := tables.metrics_table(entry.first))],
        "costs": tables.cost_table(results),
        "cost_note": tables.COST_NOTE,
        "figures": [spec for spec in specs if not _is_wide(spec)],
        "wide_figures": [spec for spec in specs if _is_wide(spec)],
        "traffic": [(entry.label, traffic_statement(entry)) for entry in entries],
        "privacy": [(entry.label, privacy_statement(entry)) for entry in entries],
        "privacy_table": tables.privacy_table(results),
        "attacks": [(entry.label, attack_statement(entry, results)) for entry in entries],
        "runs": tables.runs_table(results),
        "configurations": [
            (entry.label, (entry.first.folder / "config.yaml").read_text(encoding="utf-8")) for entry in entries
        ],
    }


def _is_wide(spec: FigureSpec) -> bool:
    """Whether a figure takes the page's whole width; the others are arranged in columns."""
    return len(spec.panels) > 2


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


def _values(runs: Sequence[FinishedRun], reader: Callable[[FinishedRun], object]) -> str:
    """Read a fact from every run, and list its distinct values."""
    values = sorted({reader(run) for run in runs}, key=lambda value: (str(type(value)), value))
    return ", ".join(map(str, values))


def list_caveats(results: Results) -> list[str]:
    """Return the warnings about a report's rows, one sentence each."""
    entries = results.entries
    caveats = _run_warnings(results.runs) + _differences(results.runs)
    for entry in entries:
        repeated = sorted(seed for seed, number in Counter(run.seed for run in entry.runs).items() if number > 1)
        if repeated:
            caveats.append(
                f"{entry.label}: seed {repeated[0]} appears in several folders; repetitions are not independent"
            )
    single = [entry.label for entry in entries if len(entry.runs) == 1]
    if single and len(single) == len(entries):
        caveats.append("One seed per row: there is no standard deviation, and small differences mean nothing.")
    elif single:
        caveats.append(f"One seed only, so no standard deviation: {', '.join(single)}")
    if any(len(entry.runs) > 1 and not all(run.rows_are_fixed for run in entry.runs) for entry in entries):
        caveats.append(
            "Seeds also choose the rows (data.seed is unset): the standard deviation holds the noise of the split and "
            "that of training together."
        )
    caveats += [*alarms(results), *_small_test_sets(results.runs), *beaten_by_words(results)]
    if len({tuple(sorted({run.seed for run in entry.runs})) for entry in entries}) > 1:
        caveats.append("Rows have different seeds: tests pair only those that two rows share.")
    late = [entry.label for entry in entries if all(_chose_its_last_round(run) for run in entry.runs)]
    if late:
        caveats.append(f"Best at the last round with every seed, so more rounds may help: {', '.join(late)}")
    if (most := tables.MOST_SILOS) < len(results.silos):
        caveats.append(f"More than {most} silos: the table has their average; table.csv has every silo.")
    return caveats


def _small_test_sets(runs: Sequence[FinishedRun]) -> list[str]:
    """Warn of silos that are tested on few rows: one row changes their score by a point or more."""
    smallest: dict[str, int] = {}
    for run in runs:
        for name, silo in run.summary["silos"].items():
            rows = (silo.get("rows") or {}).get("test")
            if rows is not None:
                smallest[name] = min(rows, smallest.get(name, rows))
    few = [f"{name} ({rows})" for name, rows in smallest.items() if rows < _FEW_ROWS]
    if not few:
        return []
    more = f" and {len(few) - _MOST_WARNED} more" if len(few) > _MOST_WARNED else ""
    named = ", ".join(few[:_MOST_WARNED]) + more
    return [f"Fewer than {_FEW_ROWS} test rows, so that one row changes the score by a point or more: {named}"]


def _run_warnings(runs: Sequence[FinishedRun]) -> list[str]:
    """Collect the warnings of single runs; the same warning of several runs becomes one sentence."""
    runs_by_remark: dict[str, list[str]] = {}
    for run in runs:
        for remark in _warnings_of_run(run):
            runs_by_remark.setdefault(remark, []).append(f"{run.folder.name} (seed {run.seed})")
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {remark}"
        for remark, names in runs_by_remark.items()
    ]


def _warnings_of_run(run: FinishedRun) -> list[str]:
    refusals = refusal_warning(run.events)
    remarks = [refusals] if refusals else []
    for kind, number in Counter(str(event.get("event")) for event in run.events).items():
        if kind not in _EXPECTED_EVENTS:
            remarks.append(f"{number} × “{kind}” in events.jsonl")
    for event in run.events_of("budget"):
        remarks.append(f"stopped after round {event.get('round')}: {event.get('reason')}")
    for event in run.events_of("versions"):
        remarks.append(f"resumed under other versions: {', '.join(map(str, event.get('changed', [])))}")
    silos = run.summary["silos"]
    trained = {event["silo"] for event in (*run.events_of("silo"), *run.events_of("final"))}
    never = sorted({*silos} - trained)
    if never and run.summary["method"] not in trained:  # the one training silo of a centralized method has its name
        remarks.append(f"never sampled, so never trained: {', '.join(never)}")
    unvalidated = sorted(silo for silo, result in silos.items() if result.get("validation") is None)
    if len(unvalidated) == len(silos):
        remarks.append("no validation scores, so the last round counts")
    elif unvalidated:
        remarks.append(f"no validation scores of {', '.join(unvalidated)}: the best round is chosen without them")
    return remarks


def _chose_its_last_round(run: FinishedRun) -> bool:
    """Return whether the last of several rounds had the best validation score."""
    validated = any(silo.get("validation") is not None for silo in run.summary["silos"].values())
    return validated and run.summary["best_round"] == run.summary["rounds"] > 1


def _differences(runs: Sequence[FinishedRun]) -> list[str]:
    versions = {run.folder: read_versions(run.folder) for run in runs}
    settings: dict[str, Callable[[FinishedRun], object]] = {
        "precision": lambda run: run.summary.get("precision"),
        "threads": lambda run: run.summary.get("threads"),
        "rounds": lambda run: run.summary.get("rounds"),
        "backbone": lambda run: versions[run.folder].get("backbone", run.summary.get("backbone")),
        "version of torch": lambda run: versions[run.folder].get("torch"),
        "version of silotune": lambda run: versions[run.folder].get("silotune"),
    }
    remarks = []
    for setting, reader in settings.items():
        values = sorted({str(reader(run))[:16] for run in runs})
        if len(values) > 1:
            remarks.append(f"The runs differ in {setting}: {', '.join(values)}")
    return remarks


def traffic_statement(entry: ReportEntry) -> str:
    """Say which parts left the silos, and the bytes of all messages of a run."""
    up, down = (entry.mean_of(key) / MIB for key in ("bytes_up", "bytes_down"))
    total = f"In all, {up:.2f} MiB from silos and {down:.2f} MiB to them." if up or down else ""
    return f"{_sent_parts(entry)} {total}".strip()


def _sent_parts(entry: ReportEntry) -> str:
    run = entry.first
    try:
        method = make_method(read_config(str(run.folder / "config.yaml")))
    except (InputError, ValueError):  # the run was made by another version of the package
        return f"{run.summary['sent_parameters']:,} parameters left a silo in every round it took part in."
    if method.collects_rows:
        return "All rows were in one place: no federation."
    leaving, private = ", ".join(method.sends()), ", ".join(names_with(method.parts(), Scope.PRIVATE))
    if not run.message_bytes:
        return f"Nothing left a silo. Kept: {private or leaving}."
    size = run.message_bytes / MIB
    line = f"Sent: {leaving} ({run.summary['sent_parameters']:,} parameters; {size:.2f} MiB a message, as measured)."
    return f"{line} Kept: {private}." if private else line


def privacy_statement(entry: ReportEntry) -> str:
    """Say whether noise protects the updates, and name the limits of the guarantee."""
    guarantees = [run.summary["privacy"] for run in entry.runs if run.summary.get("privacy")]
    if not guarantees:
        if not entry.first.summary["bytes_up"]:
            return "Nothing was sent, so nothing needed protection from the coordinator."
        return (
            "No differential privacy: updates left the silos without noise. What they tell about rows is not bounded."
        )
    limits = dict.fromkeys(str(guarantee["uncovered"]) for guarantee in guarantees if guarantee.get("uncovered"))
    spent = sorted({f"{guarantee['epsilon_total']:.4g}" for guarantee in guarantees})
    text = f"Differential privacy by {guarantees[0]['mechanism']}: ε = {', '.join(spent)} in total, δ = "
    text += f"{guarantees[0]['delta']:g}."
    if len(guarantees) < len(entry.runs):
        text += f" In {len(guarantees)} of {len(entry.runs)} runs only."
    return text + "".join(f" The guarantee does not hold against {limit}." for limit in limits)


def attack_statement(entry: ReportEntry, results: Results) -> str:
    """Say whether an attack was simulated, its success rate, and the aggregation used as defense."""
    config = entry.first.config
    attack, aggregation = config.get("attack") or {}, config.get("aggregation") or {}
    name = str(aggregation.get("name", "samples") if isinstance(aggregation, dict) else aggregation)
    defense = f"Aggregation: {name}{', a mean that takes updates as they are' if name in _MEANS else ''}."
    rate = results.success_rate(entry.label)
    if rate is None and attack.get("name", "none") == "none":
        return f"No attack was simulated. {defense}"
    percent = 100 * float(attack.get("fraction", 0))
    text = f"Backdoor by {percent:g} % of the silos toward the label {attack.get('target')!r}"
    measured = "not measured" if rate is None else f"{rate.text} % of the test rows with the trigger"
    return f"{text}: success {measured}. {defense}"
