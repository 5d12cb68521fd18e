"""`status_page`: a coordinator's runs and silos as one HTML page, without scripts or outside resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from silotune.core.numeric import clock_text
from silotune.deploy.curves import COLORS, curve_chart
from silotune.deploy.federation_metrics import FAILURE_EVENTS
from silotune.deploy.run_queue import QueuedRun
from silotune.deploy.status_words import busy, short_time, size
from silotune.runs.storage.readers import events

REFRESH = 10
"""Seconds after which a browser loads the page again."""

SHOWN = 10
"""Newest rounds, runs and problems that are listed."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --dim: #66727f; --line: #d5dbe1; --page: #fff; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --dim: #97a3af; --line: #3a444e; --page: #14191e; --bad: #ff8a80 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 66rem; padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; width: 100% } .wide { overflow-x: auto }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th, .dim, figcaption { color: var(--dim); font-weight: normal } .bad { color: var(--bad) }
figure { display: inline-block; margin: 0 1.5rem 1rem 0 } svg { max-width: 100%; height: auto }
progress { width: 16rem; accent-color: #3d7be0 } .key { display: inline-block; margin-right: 1rem; white-space: nowrap }
"""


def status_page(status: Mapping[str, Any], runs: Sequence[QueuedRun], run: QueuedRun | None) -> str:
    """Return the page.

    Args:
        status: as `federation_status` returns it.
        runs: all of the coordinator's runs.
        run: the one whose rounds are shown.
    """
    coordinator = status["coordinator"]
    state = "running" if coordinator["running"] else "not running"
    problem = f'<p class="bad">SuperLink: {escape(coordinator["superlink"])}</p>' if coordinator["superlink"] else ""
    free, now = size(coordinator["disk_free_bytes"]), short_time(status["time"])
    facts = f"silotune {coordinator['version']} · {free} free · {now} UTC"
    body = [
        f"<h1>Coordinator: {state}</h1>",
        f'<p class="dim">{escape(facts)}; refreshed every {REFRESH} s</p>',
        problem,
    ]
    if run is not None:
        body += _run(run, coordinator["run"], list(events(Path(run.out))))
    body += ["<h2>Silos</h2>", _silos(status["silos"]), "<h2>Runs</h2>", _runs(runs)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>silotune federation</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH}"><style>{_STYLE}</style></head><body>'
        f"{''.join(body)}</body></html>"
    )


def _run(run: QueuedRun, active: Mapping[str, Any] | None, log: Sequence[Mapping[str, Any]]) -> list[str]:
    rounds = [event for event in log if event.get("event") == "round"]
    done = active["finished_rounds"] if active is not None else max((event["round"] for event in rounds), default=0)
    head = f"round {done} of {run.rounds} finished"
    if active is not None and active["since"]:
        head += f"; round {active['round']} since {short_time(active['since'])}"
    if active is not None and active["activity"]:
        head += f": {active['activity']}"
    error = f'<p class="bad">{escape(run.error)}</p>' if run.error else ""
    parts = [
        f"<h2>Run {run.number}: {escape(run.method)}, {escape(run.state)}</h2>",
        f'<p><progress max="{run.rounds}" value="{done}"></progress> {escape(head)}</p>{error}',
    ]
    names = list(run.silos)
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    validation = {
        name: [(event["round"], (event.get("validation") or {}).get(name)) for event in rounds]
        for name in [*names, "global"]
    }
    loss = {
        name: [
            (event["round"], event.get("loss"))
            for event in log
            if event.get("event") == "silo" and event.get("silo") == name
        ]
        for name in names
    }
    charts = [
        curve_chart("Validation score by round", validation, colors),
        curve_chart("Training loss by round", loss, colors),
    ]
    if any(charts):
        key = "".join(
            f'<span class="key"><svg width="10" height="10" aria-hidden="true"><rect width="10" height="10" '
            f'fill="{color}"/></svg> {escape(name)}</span>'
            for name, color in colors.items()
        )
        parts += [f"<div>{''.join(charts)}</div><p>{key}</p>"]
    if rounds:
        rows = [(event["round"], ", ".join(event.get("silos") or []), _time(event.get("seconds"))) for event in rounds]
        parts += [
            "<h2>Rounds</h2>",
            table(("round", "silos that contributed", "time since the start"), rows[: -SHOWN - 1 : -1]),
        ]
    problems = [
        (event.get("round", ""), event.get("silo", ""), event.get("reason", ""))
        for event in log
        if event.get("event") in FAILURE_EVENTS
    ]
    if problems:
        parts += [
            f"<h2>Problems ({len(problems)})</h2>",
            table(("round", "silo", "reason"), problems[: -SHOWN - 1 : -1]),
        ]
    return parts


def _silos(silos: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for silo in silos:
        online = {True: "online", False: "offline", None: "not known"}[silo["online"]]
        epsilon = silo["epsilon_left"]
        rows.append(
            (
                silo["silo"],
                online,
                busy(silo["busy"]),
                silo["last_seen"] and short_time(silo["last_seen"]),
                silo["version"],
                silo["rows_fingerprint"] and silo["rows_fingerprint"][:8],
                None if epsilon is None else f"{epsilon:.4g}",
                size(silo["disk_free_bytes"]),
            )
        )
    return table(("silo", "", "busy with", "last seen (UTC)", "version", "rows", "ε left", "disk free"), rows)


def _runs(runs: Sequence[QueuedRun]) -> str:
    rows = [
        (run.number, run.state, run.method, ", ".join(run.silos), short_time(run.began), short_time(run.ended))
        for run in runs
    ]
    return table(("run", "state", "method", "silos", "began (UTC)", "ended"), rows[: -SHOWN - 1 : -1])


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else clock_text(seconds)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table; cells that are None or empty are dashes."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ("".join(f"<td>{'–' if cell in (None, '') else escape(str(cell))}</td>" for cell in row) for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
