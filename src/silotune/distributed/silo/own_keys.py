"""`own_key`: random keys that a silo makes once in its folder and never sends; `ORDER_KEY`, `STATUS_KEY`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from silotune.errors import InputError

ORDER_KEY = "order.key"
"""The file of the key from which the order of rows and the dropout of local steps are drawn."""

STATUS_KEY = "status.key"
"""The file of the key of the rows' fingerprint."""

_BYTES = 32


def own_key(folder: Path, name: str) -> bytes:
    """Return a key of 32 bytes; the first call makes its file, which its user alone may read.

    Args:
        folder: the silo's.
        name: `ORDER_KEY` or `STATUS_KEY`.
    """
    path = folder / name
    try:
        if not path.exists():
            _make(path)
        key = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read or made ({error.strerror})") from error
    if len(key) != _BYTES:
        raise InputError(f"{path}: damaged; restore it, or remove it for a new one")
    return key


def _make(path: Path) -> None:
    """Write a new key, complete or not at all; a folder has one worker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_BYTES))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
