"""Folders that are made, and files that are replaced as a whole.

Whoever reads one finds the old content or the new, whenever the writer ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from silotune.errors import InputError


def make_folder(path: Path, culprit: str) -> None:
    """Make a folder that a user asked for, where there is none.

    Raises:
        InputError: naming the culprit; it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{culprit}: cannot be made ({error.strerror})") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file that one process at a time writes: what a killed one left half done, the next one overwrites.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    _replace(path, content, "tmp")


def write_text(path: Path, text: str) -> None:
    """Replace a file, which others may be doing too, by this text in UTF-8.

    Raises:
        OSError: as `write_bytes`.
    """
    _replace(path, text.encode(), str(os.getpid()))


def _replace(path: Path, content: bytes, suffix: str) -> None:
    temporary = path.with_name(f".{path.name}.{suffix}")
    temporary.write_bytes(content)
    temporary.replace(path)
