"""`show_status` prints `silotune federation status`: lines about coordinator, run and queue; a table of silos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from silotune.cli.console import console, say
from silotune.deploy.status_words import busy, short_time, size


def show_status(state: Mapping[str, Any]) -> None:
    """Print the state of a federation, as `federation_status` returns it."""
    coordinator = state["coordinator"]
    say(f"coordinator: {'running' if coordinator['running'] else 'not running'}")
    if coordinator["superlink"]:
        say(f"SuperLink: does not answer ({coordinator['superlink']})")
    run = coordinator["run"]
    if run is not None:
        round_words = "" if run["round"] is None else f", round {run['round']} since {run['since']}"
        say(f"run {run['run']}: {run['finished_rounds']} of {run['rounds']} rounds finished{round_words}")
        if run["activity"]:
            say(f"  {run['activity']}")
    if coordinator["queue"]:
        say(f"queue: {', '.join(map(str, coordinator['queue']))}")
    say(f"disk free: {size(coordinator['disk_free_bytes'])}")
    table = Table()
    for column in ("silo", "state", "busy with", "last seen", "version", "rows", "ε left", "disk free"):
        table.add_column(column, no_wrap=column in ("silo", "state"))
    for silo in state["silos"]:
        online = {True: "online", False: "offline", None: "not known"}[silo["online"]]
        epsilon, rows = silo["epsilon_left"], silo["rows_fingerprint"]
        cells = (
            silo["silo"],
            online,
            busy(silo["busy"]) or "–",
            short_time(silo["last_seen"] or "–"),
            silo["version"] or "–",
            rows[:8] if rows else "–",
            "–" if epsilon is None else f"{epsilon:.4g}",
            size(silo["disk_free_bytes"]),
        )
        table.add_row(*map(escape, cells))
    if state["silos"]:
        console.print(table)
