"""Makes folders and replaces files atomically: a reader sees the old content or the new, even after a crash."""

from __future__ import annotations

import os
from pathlib import Path

from silotune.errors import InputError


def make_folder(path: Path, culprit: str) -> None:
    """Make a folder that a user asked for, with its parents; an existing one is kept.

    Args:
        path: the folder.
        culprit: what to name in the error message, e.g. `--out PATH`.

    Raises:
        InputError: the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{culprit}: cannot be made ({error.strerror})") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file that only one process writes at a time; a leftover of a killed writer is overwritten.

    Raises:
        OSError: the file cannot be written; its old content stays.
    """
    _replace(path, content, "tmp")


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text; several processes may do so at the same time.

    Raises:
        OSError: the file cannot be written; its old content stays.
    """
    _replace(path, text.encode(), str(os.getpid()))


def _replace(path: Path, content: bytes, suffix: str) -> None:
    temporary = path.with_name(f".{path.name}.{suffix}")
    temporary.write_bytes(content)
    temporary.replace(path)
