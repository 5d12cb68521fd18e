"""Readers of a run folder's files: `events`, `refusal_warning`, `read_summary` and `read_versions`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from silotune.core.files import damage_named, read_json
from silotune.errors import InputError

EVENTS = "events.jsonl"
"""The event log in a run folder: a JSON object a line."""

_MOST_NAMED = 8
"""Runs within a folder that a message names."""


def events(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run; a last line cut off by a kill is skipped."""
    path = run / EVENTS
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def refusal_warning(events: Iterable[Mapping[str, Any]]) -> str | None:
    """Return how many of a run's updates were refused and why the first was; None if all were accepted."""
    refused = [event for event in events if event.get("event") == "refused"]
    if not refused:
        return None
    first, times = refused[0], "1 update was" if len(refused) == 1 else f"{len(refused)} updates were"
    return f"{times} refused; the first in round {first.get('round')} from {first.get('silo')}: {first.get('reason')}"


def read_summary(run: Path) -> dict[str, Any]:
    """Return a finished run's `summary.json`."""
    try:
        return read_json(run / "summary.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{run}: no finished run there (no readable summary.json){_runs_within(run)}") from error


def _runs_within(folder: Path) -> str:
    """Name the finished runs of a comparison's or sweep's folder; empty where there are none."""
    runs = sorted(file.parent.name for file in folder.glob("*/summary.json"))
    more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    return f"; it holds several runs; choose one: {', '.join(runs[:_MOST_NAMED])}{more}" if runs else ""


def read_versions(run: Path) -> dict[str, Any]:
    """Return `versions.json`: the libraries' versions, and the fingerprint of the `backbone`."""
    with damage_named(run / "versions.json"):
        made_with = read_json(run / "versions.json")
        made_with["backbone"]
    return made_with
