"""Show a running run in the terminal, read from its events (`silotune watch`)."""

from __future__ import annotations

import time
from pathlib import Path

from silotune.cli.console import console, say
from silotune.cli.result_table import result_table
from silotune.config import load_resolved
from silotune.core.files import damage_named, is_locked
from silotune.errors import InputError
from silotune.runs.callbacks.base import EventFeed
from silotune.runs.callbacks.display import RoundLines, RunBar, new_bars
from silotune.runs.storage.readers import events, read_summary, refusal_warning

PATIENCE = 10.0
"""Seconds without a process in the folder before a run counts as interrupted; a resumed run loads its backbone
first."""


def watch_run(
    run: Path, *, once: bool = False, every: float = 1.0, silos: bool = False, patience: float = PATIENCE
) -> None:
    """Show a run until it is finished or no process works on it for `patience` seconds; or its present state once."""
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run}: no run folder there (no config.yaml)")
    config, finished = load_resolved(run / "config.yaml"), run / "summary.json"
    title, rounds, last_active = config.method.name, config.rounds, time.monotonic()
    with new_bars(console) as bars:
        callbacks = [RoundLines(say, title, rounds, silos, replayed=True), RunBar(bars, run.name, rounds)]
        with EventFeed(run, rounds, callbacks) as feed:
            while not once and not finished.exists() and time.monotonic() - last_active < patience:
                feed.poll()
                time.sleep(every)
                if is_locked(run):
                    last_active = time.monotonic()
    if refusals := refusal_warning(events(run)):
        say(f"warning: {refusals}")
    if finished.exists():
        summary = read_summary(run)
        with damage_named(finished):
            table = result_table([summary])
        console.print(table)
    elif not once:
        say("not finished, and nobody works on it: interrupted (--resume goes on), or a sweep's trial")
