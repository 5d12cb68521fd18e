"""A silo's own secret: random bytes that it makes once in its folder and never sends."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from silotune.errors import InputError, file_errors

SECRET_FILE = "secret.key"

_BYTES = 32


def derived_from_secret(folder: Path, purpose: str) -> bytes:
    """Return 32 bytes that only the holder of the silo's secret can compute; makes the secret on the first call."""
    path = folder / SECRET_FILE
    with file_errors(f"{path}: cannot be read or made"):
        if not path.exists():
            write_secret(path)
        secret = path.read_bytes()
    if len(secret) != _BYTES:
        raise InputError(f"{path}: damaged; restore it, or remove it for a new one")
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()


def write_secret(path: Path) -> None:
    """Write 32 new random bytes completely or not at all, readable by their owner alone; a folder has one worker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_BYTES))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
