"""What a run folder says to whoever reads it: the events so far, the summary at the end, and by what it was made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from silotune.errors import InputError


def events(run: Path) -> Iterator[dict[str, Any]]:
    """The events of a run; a last line cut off by a kill is passed over."""
    path = run / "events.jsonl"
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def read_summary(run: Path) -> dict[str, Any]:
    """A finished run's `summary.json`.

    Raises:
        InputError: if it is not there.
    """
    path = run / "summary.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{run}: no finished run there (no readable summary.json)") from error


def read_versions(run: Path) -> dict[str, Any]:
    """`versions.json`: the libraries' versions, and the fingerprint of the `backbone`.

    Raises:
        InputError: if it is not there, or without a backbone.
    """
    try:
        found = dict(json.loads((run / "versions.json").read_text(encoding="utf-8")))
        found["backbone"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run}/versions.json: missing or damaged") from error
    return found
