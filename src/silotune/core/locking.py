"""Keep other processes out of a folder, such as a run's, while this one works in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from silotune.core.files import make_folder
from silotune.errors import InputError

LOCK_FILE = ".lock"
"""Name of the lock file; it exists while the folder is locked."""


@contextmanager
def folder_lock(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder for this process. The operating system releases the lock when the process ends.

    Args:
        path: the folder; it is made if missing.
        patience: seconds to wait for another process to release the lock.
    """
    make_folder(path, f"--out {path}")
    lock = FileLock(path / LOCK_FILE)
    try:
        lock.acquire(timeout=patience, poll_interval=0.1)
    except Timeout:
        raise InputError(f"{path}: another process is at work there; wait for it, or end it") from None
    except OSError as error:
        raise InputError(f"--out {path}: cannot be locked ({error.strerror})") from error
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows removes no open file; there the release removes it
            (path / LOCK_FILE).unlink(missing_ok=True)  # before the release: the next process makes a new one
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a folder; True if the system cannot tell."""
    file = path / LOCK_FILE
    if not file.exists():
        return False
    try:
        with FileLock(file, timeout=0):
            return False
    except (Timeout, OSError):
        return True
