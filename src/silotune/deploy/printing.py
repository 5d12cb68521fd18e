"""Print the status of a federation, audit logs, and what a `doctor` command found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from silotune.cli.console import console, new_table, say
from silotune.communication.privacy.accountant import DELTA, assuming
from silotune.distributed.protocol.disclosure import HIDDEN
from silotune.errors import SilotuneError

if TYPE_CHECKING:
    from silotune.deploy.doctor import Finding
    from silotune.distributed.silo.row_ledger import RowLedger


def print_status(state: Mapping[str, Any]) -> None:
    """Print the state of a federation, as `federation_status` returns it."""
    from rich.markup import escape

    coordinator = state["coordinator"]
    say(f"coordinator: {'running' if coordinator['running'] else 'not running'}")
    if coordinator["superlink"]:
        say(f"SuperLink: does not answer ({coordinator['superlink']})")
    run = coordinator["run"]
    if run is not None:
        words = "" if run["round"] is None else f", round {run['round']} since {run['since']}"
        say(f"run {run['run']}: {run['finished_rounds']} of {run['rounds']} rounds finished{words}")
        if run["activity"]:
            say(f"  {run['activity']}")
    if coordinator["queue"]:
        say(f"queue: {', '.join(map(str, coordinator['queue']))}")
    for run in coordinator["waiting"]:
        silos = ", ".join(f"{name} since {_moment(since)}" for name, since in run["silos"].items())
        say(f"run {run['run']} waits for approval: {silos}")
    for run in coordinator["failed"]:
        say(f"run {run['run']} failed {_moment(run['ended'])}: {run['error']}")
        for name, reason in run["reasons"].items():
            if reason not in run["error"]:
                say(f"  {name}: {reason}")
    say(f"disk free: {_size(coordinator['disk_free_bytes'])}")
    if coordinator["certificate_days"]:
        say(f"certificates: {days_text(coordinator['certificate_days'])}")
    if not state["silos"]:
        return
    table = new_table(None, ("silo", "state", "busy with", "last seen", "version", "rows"), ("ε left", "disk free"))
    for silo in state["silos"]:
        epsilon, rows = silo["epsilon_left"], silo["rows_fingerprint"]
        cells = (
            silo["silo"],
            {True: "online", False: "offline", None: "not known"}[silo["online"]],
            _busy(silo["busy"]),
            _moment(silo["last_seen"]),
            silo["version"] or "–",
            rows[:8] if rows else "–",
            "–" if epsilon is None else f"{epsilon:.4g}",
            _size(silo["disk_free_bytes"]),
        )
        table.add_row(*map(escape, cells))
    console.print(table)


def print_silo(state: Mapping[str, Any], as_json: bool) -> None:
    """Print the state of a silo or its node, as `silo_status` returns it."""
    if as_json:
        typer.echo(json.dumps(state, indent=1))
        return
    worker, link, run, budget = state["worker"], state["link"], state["run"], state["budget"]
    say(f"silo {state['silo']!r}: {'running' if state['running'] else 'not running'}")
    say(f"worker: {'no answer' if worker is None else worker.get('busy') or 'ready'}")
    if run is not None:
        say(f"run {run['run']}: {run['asked']}, round {run['round']} of {run['rounds'] or 'an unknown number'}")
    if state["waiting"]:
        say(f"waits for approval: {', '.join(state['waiting'])}")
    if budget is not None:
        assumption = assuming(budget.get("colluders"))
        say(f"ε left: {budget['left']:.4g} of {budget['epsilon']:g} for {budget['of']}{assumption}")
    if link is not None:
        say(
            f"link: {'down' if link['reason'] else 'up'} since {link['since']}"
            + (link["reason"] and f" ({link['reason']})")
        )
        say(f"certificates: {days_text(link['days'])}")


def days_text(days: Mapping[str, float]) -> str:
    """Return the days left of certificates in words."""
    return ", ".join(f"{name}'s {number:.0f} days left" for name, number in days.items())


def _busy(state: Mapping[str, Any] | None) -> str:
    """Describe in words the work that a silo is doing."""
    if state is None or state["state"] == "idle":
        return "–" if state is None else "idle"
    if state["state"] != "working":
        return f"run {state['run']}: {state['state']}"
    return f"run {state['run']}, round {state['round']}: {state['kind']} since {state['since'][11:19]}"


def _moment(time: str | None) -> str:
    """Return month, day and minute of a time in ISO format (UTC)."""
    return time[5:16].replace("T", " ") if time else "–"


def _size(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**30:.1f} GiB"


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of a coordinator's runs."""
    from rich.markup import escape

    table = new_table(None, ("run", "state", "method", "round", "silos", "began", "folder"))
    for run in runs:
        activity = run["activity"] or run["error"]
        state = run["state"] + (f": {activity}" if activity else "")
        cells = (str(run["run"]), state, run["method"], f"{run['round']}/{run['rounds']}", ", ".join(run["silos"]))
        table.add_row(*map(escape, (*cells, _moment(run["began"]), run["out"])))
    console.print(table)


def incidents(run: Path) -> list[str]:
    """Return what silos' notes and failures say about a run: each once, with how often it happened."""
    from silotune.distributed.protocol.frames import printable
    from silotune.runs.storage.readers import events

    counts = Counter(
        f"silo {event.get('silo')!r}: {event.get('note') or event.get('reason')}"
        for event in events(run)
        if event.get("note") or event["event"] == "silo-failed"
    )
    return [printable(line) + f" ({times} times)" * (times > 1) for line, times in counts.items()]


def print_survey(survey: Mapping[str, Any]) -> None:
    """Print the counts of a survey, bins that no silo has enough rows of left out, and its warnings."""
    from rich.markup import escape

    table = new_table(None, ["figure: bin"], [*map(escape, survey["silos"]), "all"])
    for title, bins in survey["all"].items():
        for name, total in bins.items():
            of_silos = [counts.get(title, {}).get(name, "–") for counts in survey["silos"].values()]
            if any(type(count) is int for count in of_silos):
                table.add_row(*map(escape, (f"{title}: {name}", *map(str, of_silos), str(total))))
    console.print(table)
    for silo, figures in survey["untold"].items():
        say(f"silo {silo!r} does not tell: {', '.join(figures)}")
    for line in survey["warnings"]:
        say(f"warning: {line}")


def counts_text(figures: Mapping[str, Any]) -> str:
    """Return the counts of a survey in words."""
    parts = []
    for figure, bins in figures.items():
        counts = [f"{name}: {count}" for name, count in dict(bins).items() if type(count) is int]
        others = [f"all others: {HIDDEN}"] * (len(counts) < len(bins))
        parts.append(f"{figure} ({', '.join(counts + others)})")
    return "; ".join(parts)


def print_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """Print what a `doctor` command found, and exit with code 1 if there is a problem."""
    failed = any(finding.state == "problem" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [vars(finding) for finding in findings]}, indent=1))
    else:
        for finding in findings:
            say(f"{finding.state:<8} {finding.check:<16} {finding.detail}")
            if finding.remedy:
                say(f"{'':<25} remedy: {finding.remedy}")
    if failed:
        raise typer.Exit(1)


def print_audit(folder: Path, as_json: bool, ledger: RowLedger | None = None) -> None:
    """Check the audit log in a folder and print sums and problems; a silo's ledger has the ε of its noise on rows."""
    from silotune.core.records import check_audit
    from silotune.distributed.protocol.frames import printable

    entries, problems = check_audit(folder)
    runs = totals(entries)
    privacy = None if ledger is None else _of_ledger(ledger, runs)
    last = max((entry["number"] for entry in entries), default=0)
    if as_json:
        report = {"lines": len(entries), "last": last, "problems": problems, "runs": runs, "privacy": privacy}
        print(json.dumps(report, indent=1))
    else:
        for run, total in runs.items():
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(total["kinds"].items()))
            say(f"run {run}: {total['messages']} messages ({kinds}), {total['bytes']:,} bytes")
            assumption = assuming(None if ledger is None else ledger.assumed(run))
            say(f"  {total['numbers']:,} numbers, up to round {total['rounds']}, ε {total['epsilon']:g}{assumption}")
            say(f"  {total['first']} to {total['last']}")
        if privacy is not None:
            say(
                f"noise on rows: ε {privacy['spent']:.4g} of {privacy['epsilon']:g} at δ = {privacy['delta']:g} for "
                f"each {privacy['unit']} is spent or set aside{assuming(privacy.get('colluders'))}"
            )
        for entry in entries:
            if "survey" in entry:
                say(printable(f"{entry['time']} survey of run {entry['run']}: {counts_text(entry['survey'])}"))
            if "sha256" not in entry:
                words = [str(entry[name]) for name in ("kind", "run", "silo", "user", "reason") if entry.get(name)]
                say(printable(f"{entry['time']} {' '.join(words)}"))
        for problem in problems:
            say(printable(f"CHANGED: {problem}"))
    if problems:
        raise SilotuneError(f"{folder}: the audit log was changed in {len(problems)} places (first: {problems[0]})")
    if not as_json:
        say(f"{len(entries)} lines, none changed, removed or inserted")


def _of_ledger(ledger: RowLedger, runs: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Add the ε of noise on rows to the sums of runs, and return the state of its budget; None without one."""
    budget, delta = ledger.budget, DELTA if ledger.budget is None else ledger.budget.delta
    for run in ledger.charged_runs():
        if run in runs:
            runs[run]["epsilon"] += ledger.epsilon_of(run, delta)
    if budget is None:
        return None
    spent = ledger.spent(budget.unit)
    fields = {"unit": budget.unit, "spent": spent, "epsilon": budget.epsilon, "delta": budget.delta}
    return fields if (colluders := ledger.assumed()) is None else fields | {"colluders": colluders}


def totals(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sum up an audit log per run: messages by kind, numbers, bytes, rounds, and the ε of all noised messages.

    A message that is sent again (with the same digest) is counted again with its bytes, but not its numbers and ε.
    """
    runs: dict[str, dict[str, Any]] = {}
    messages: set[tuple[str, str]] = set()
    for entry in entries:
        if "sha256" not in entry:
            continue
        run = str(entry.get("run") or "none")
        total = runs.setdefault(
            run, {"messages": 0, "kinds": {}, "numbers": 0, "bytes": 0, "rounds": 0, "epsilon": 0.0, "first": ""}
        )
        kind = " ".join(str(entry[name]) for name in ("direction", "kind") if name in entry)
        total["first"] = total["first"] or entry["time"]
        total["last"] = entry["time"]
        total["messages"] += 1
        total["kinds"][kind] = total["kinds"].get(kind, 0) + 1
        total["bytes"] += entry["bytes"]
        if (run, entry["sha256"]) not in messages:
            messages.add((run, entry["sha256"]))
            total["numbers"] += entry.get("numbers") or 0
            total["epsilon"] += entry.get("epsilon") or 0.0
        if entry["kind"] in ("answer", "round"):
            total["rounds"] = max(total["rounds"], entry.get("round") or 0)
    return runs
