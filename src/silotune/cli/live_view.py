"""Show a running run in the terminal, read from its events (`silotune watch`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from silotune.cli.console import new_table
from silotune.cli.result_table import mebibytes
from silotune.config import Config, load_resolved
from silotune.core.files import damage_named, is_locked
from silotune.core.numeric import clock_text
from silotune.errors import InputError
from silotune.runs.scores import average_text
from silotune.runs.storage.readers import events, read_summary

PATIENCE = 10.0
"""Seconds without a process in the folder before a run counts as interrupted; a resumed run loads its backbone
first."""


def watch_run(
    run: Path, console: Console, *, once: bool = False, every: float = 1.0, patience: float = PATIENCE
) -> None:
    """Show a run until it is finished or no process works on it for `patience` seconds; or its present state once."""
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run}: no run folder there (no config.yaml)")
    config = load_resolved(run / "config.yaml")
    if once:
        console.print(frame(run, config))
        return
    last_active = time.monotonic()
    with Live(frame(run, config), console=console, auto_refresh=False) as live:
        while not (run / "summary.json").exists() and time.monotonic() - last_active < patience:
            time.sleep(every)
            if is_locked(run):
                last_active = time.monotonic()
            live.update(frame(run, config), refresh=True)
        live.update(frame(run, config), refresh=True)
    if not (run / "summary.json").exists():
        console.print(
            "not finished, and nobody works on it: interrupted (--resume goes on), or a sweep's trial", soft_wrap=True
        )


def frame(run: Path, config: Config) -> Group:
    """Render the state of a run: its progress, and every silo's latest numbers."""
    log = list(events(run))
    parts: list[Any] = [_head(run, config.method.name, config.rounds, log)]
    if log:
        parts.append(_silos(log, config.validates_by_loss))
    refused = [event for event in log if event.get("event") == "refused"]
    if refused:
        parts.append(Text(f"{len(refused)} updates refused; the last: {refused[-1].get('reason')}", style="yellow"))
    if (run / "summary.json").exists():
        summary = read_summary(run)
        with damage_named(run / "summary.json"):
            average, best = average_text(summary), summary["best_round"]
        parts.append(Text(f"finished: average test score {average} at round {best}"))
    return Group(*parts)


def _head(run: Path, method: str, rounds: int, log: list[dict[str, Any]]) -> Text:
    rounds_ended = [event for event in log if event.get("event") == "round"]
    done = int(rounds_ended[-1]["round"]) if rounds_ended else 0
    filled = round(30 * done / rounds)
    up, down = (sum(event.get(key, 0) for event in log) for key in ("bytes_up", "bytes_down"))
    words = [f"{run.name}: {method}", f"{'━' * filled}{'╌' * (30 - filled)} round {done}/{rounds}"]
    if rounds_ended:
        elapsed = float(rounds_ended[-1]["seconds"])
        words.append(f"{clock_text(elapsed)} gone, {clock_text(elapsed / done * (rounds - done))} left")
    words.append(f"sent {mebibytes(up)}, received {mebibytes(down)}")
    return Text("   ".join(words))


def _silos(log: list[dict[str, Any]], by_loss: bool) -> Table:
    rounds_ended = [event for event in log if event.get("event") == "round"]
    trained: dict[str, dict[str, Any]] = {e["silo"]: e for e in log if e.get("event") == "silo"}
    scores: dict[str, list[float]] = {}
    for event in rounds_ended:
        for name, value in (event.get("validation") or {}).items():
            if value is not None:
                scores.setdefault(name, []).append(float(value))
    best, digits = (min, ".4f") if by_loss else (max, ".1f")
    judged = "validation loss" if by_loss else "validation %"
    table = new_table(None, ["silo"], ("round", "loss", judged, "best", "rows/s"))
    for name in dict.fromkeys([*trained, *scores]):
        latest, validation = trained.get(name, {}), scores.get(name, [])
        rows_per_second = latest["rows"] / latest["seconds"] if latest.get("seconds") and "rows" in latest else None
        table.add_row(
            escape(name),
            str(latest.get("round", "–")),
            _number(latest.get("loss"), ".4f"),
            _number(validation[-1] if validation else None, digits),
            _number(best(validation, default=None), digits),
            _number(rows_per_second, ".0f"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
