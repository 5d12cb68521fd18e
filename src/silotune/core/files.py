"""Read and replace files; a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import codecs
import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from silotune.errors import InputError


def make_folder(path: Path, culprit: str) -> None:
    """Make a folder that a user asked for, with its parents; an existing one is kept."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{culprit}: cannot be made ({error.strerror})") from error


def read_bytes(path: Path) -> bytes:
    """Read a file of a folder that may come from elsewhere.

    Raises:
        OSError: it cannot be read, or is no regular file: reading a pipe or a device might never end.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def decode_text(content: bytes, encoding: str = "utf-8") -> str:
    """Decode text without its byte-order mark; where that is UTF-16's (of Windows' editors), as UTF-16.

    Raises:
        UnicodeDecodeError: the content is not text of the encoding.
    """
    marked = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return content.decode("utf-16" if marked else encoding).removeprefix("\ufeff")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object as `read_bytes` reads files.

    Raises:
        OSError: as `read_bytes`.
        ValueError: the content is no JSON object in UTF-8, or is nested too deeply.
    """
    try:
        content = json.loads(decode_text(read_bytes(path)))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def free_bytes(folder: Path) -> int | None:
    """Return the free space where a folder is, in bytes; None if it cannot be asked for."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


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
    try:
        temporary.write_bytes(content)
    except OSError as error:
        if error.filename is None:  # of a full disk, which is found while writing
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    temporary.replace(path)
