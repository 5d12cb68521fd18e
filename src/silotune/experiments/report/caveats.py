"""What a reader should know before trusting the numbers, and what left the silos in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from silotune.errors import InputError
from silotune.experiments.report.entries import FinishedRun, ReportEntry, silo_names
from silotune.experiments.report.scores import message_bytes
from silotune.experiments.report.tables_by_method import MOST_SILOS
from silotune.methods.parts import Scope, names_with
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.storage.readers import read_versions

_KNOWN = {"silo", "round", "final", "refused", "evaluation", "server", "versions", "cohort", "budget"}
"""Events that need no remark of their own; changed versions get one (`_of_run`)."""


def list_caveats(entries: Sequence[ReportEntry]) -> list[str]:
    """One sentence each."""
    runs = [run for entry in entries for run in entry.runs]
    found = _once(runs) + _differing(runs)
    for entry in entries:
        seeds = [run.seed for run in entry.runs]
        twice = sorted(seed for seed, number in Counter(seeds).items() if number > 1)
        if twice:
            found.append(f"{entry.label}: seed {twice[0]} appears in several folders; repetitions are not independent")
    single = [entry.label for entry in entries if len(entry.runs) == 1]
    if single and len(single) == len(entries):
        found.append("One seed per row: there is no standard deviation, and small differences mean nothing.")
    elif single:
        found.append(f"One seed only, so no standard deviation: {', '.join(single)}")
    if len({tuple(sorted({run.seed for run in entry.runs})) for entry in entries}) > 1:
        found.append("Rows have different seeds: tests pair only those that two rows share.")
    late = [
        entry.label for entry in entries if all(r.summary["best_round"] == r.summary["rounds"] > 1 for r in entry.runs)
    ]
    if late:
        found.append(f"Best at the last round with every seed, so more rounds may help: {', '.join(late)}")
    if len(silo_names(entries)) > MOST_SILOS:
        found.append(f"More than {MOST_SILOS} silos: the table has their average; table.csv has every silo.")
    return found


def _once(runs: Sequence[FinishedRun]) -> list[str]:
    """What is to be said of single runs; the same of several is one sentence."""
    of: dict[str, list[str]] = {}
    for run in runs:
        for remark in _of_run(run):
            of.setdefault(remark, []).append(f"{run.folder.name} (seed {run.seed})")
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {remark}" for remark, names in of.items()
    ]


def _of_run(run: FinishedRun) -> list[str]:
    found = []
    refused = run.events_of("refused")
    if refused:
        first = refused[0]
        times = "1 update was" if len(refused) == 1 else f"{len(refused)} updates were"
        found.append(
            f"{times} refused; the first in round {first.get('round')} from {first.get('silo')}: {first.get('reason')}"
        )
    for kind, number in Counter(str(event.get("event")) for event in run.events).items():
        if kind not in _KNOWN:
            found.append(f"{number} × “{kind}” in events.jsonl")
    for event in run.events_of("budget"):
        found.append(f"stopped after round {event.get('round')}: {event.get('reason')}")
    for event in run.events_of("versions"):
        found.append(f"resumed under other versions: {', '.join(map(str, event.get('changed', [])))}")
    silos = run.summary["silos"]
    trained = {event["silo"] for event in (*run.events_of("silo"), *run.events_of("final"))}
    never = sorted({*silos} - trained)
    if never and "centralised" not in trained:
        found.append(f"never sampled, so never trained: {', '.join(never)}")
    blind = sorted(silo for silo, result in silos.items() if result.get("validation") is None)
    if blind:
        found.append(f"no validation rows in {', '.join(blind)}; the best round does not see them")
    return found


def _differing(runs: Sequence[FinishedRun]) -> list[str]:
    asked: dict[str, Callable[[FinishedRun], object]] = {
        "precision": lambda run: run.summary.get("precision"),
        "threads": lambda run: run.summary.get("threads"),
        "rounds": lambda run: run.summary.get("rounds"),
        "backbone": lambda run: versions(run).get("backbone", run.summary.get("backbone")),
        "version of torch": lambda run: versions(run).get("torch"),
        "version of silotune": lambda run: versions(run).get("silotune"),
    }
    found = []
    for what, of in asked.items():
        values = sorted({str(of(run))[:16] for run in runs})
        if len(values) > 1:
            found.append(f"The runs differ in {what}: {', '.join(values)}")
    return found


def versions(run: FinishedRun) -> dict[str, str]:
    """The run's `versions.json`; empty if there is none."""
    try:
        return read_versions(run.folder)
    except InputError:
        return {}


def describe_sent_parts(entry: ReportEntry) -> str:
    """Which parts left a silo, and which stayed."""
    run = entry.first
    try:
        method = make_method(read_config(str(run.folder / "config.yaml")))
    except (InputError, ValueError):  # of another version of the package
        return f"{run.summary['sent_parameters']:,} parameters left a silo in every round it took part in."
    if method.centralized:
        return "All rows were in one place: no federation."
    shared, own = (", ".join(names_with(method.parts(), scope)) for scope in (Scope.SHARED, Scope.PRIVATE))
    if not message_bytes(run):
        return f"Nothing left a silo. Kept: {own or shared}."
    size = message_bytes(run) / 2**20
    sent = f"Sent: {shared} ({run.summary['sent_parameters']:,} parameters; {size:.2f} MiB a message, as measured)."
    return f"{sent} Kept: {own}." if own else sent
