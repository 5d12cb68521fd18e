"""`kept_answer`: a command's answer, kept on disk until its words or the code change; `cache_folder`, the folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from silotune.core.files import read_json, write_text

OFF = "off"
"""Value of `SILOTUNE_CACHE` with which nothing is kept."""

_MOST = 200
"""Answers that are kept; the oldest leave first."""

_PACKAGE = Path(__file__).resolve().parent.parent


def cache_folder() -> Path | None:
    """Return the user's folder of what can be computed again: `SILOTUNE_CACHE`, or `~/.cache/silotune`; None if off."""
    chosen = os.environ.get("SILOTUNE_CACHE")
    if chosen:
        return None if chosen == OFF else Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "silotune"


def kept_answer(kind: str, words: Iterable[str], packages: Iterable[str], compute: Callable[[], Any]) -> Any:
    """Return a JSON value that follows from code and words alone; it is computed only where none is kept.

    Nothing is kept where a plug-in is installed, whose answers may follow from other files.

    Args:
        kind: the command.
        words: all it was told.
        packages: libraries whose code the value also follows from.
        compute: computes it; its imports are what the kept answer saves.
    """
    root = cache_folder()
    if root is None or any(group.startswith("silotune.") for group in entry_points().groups):
        return compute()
    key = json.dumps([kind, [*words], sys.version, _code(packages)])
    path = root / "answers" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return read_json(path)["answer"]
    answer = compute()
    with contextlib.suppress(OSError):  # a read-only folder costs the next command some seconds
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[: -_MOST + 1]:
            old.unlink()
        write_text(path, json.dumps({"answer": answer}))
    return answer


def _code(packages: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return name, size and time of every file of silotune, and of each library's first file."""
    files = [Path(spec.origin) for name in packages if (spec := find_spec(name)) is not None and spec.origin]
    for folder, folders, names in os.walk(_PACKAGE):
        folders[:] = [name for name in folders if name != "__pycache__"]
        files += [Path(folder) / name for name in names]
    stamps = []
    for file in sorted(files):
        status = file.stat()
        stamps.append((str(file), status.st_size, status.st_mtime_ns))
    return stamps
