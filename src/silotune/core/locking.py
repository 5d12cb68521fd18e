"""`folder_lock` keeps other processes out of a folder (a run's, a party's) by a lock file; `is_locked` asks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from silotune.errors import InputError

if sys.platform != "win32":
    import fcntl


LOCK_FILE = ".lock"
"""Name of the lock file; it exists while the folder is locked."""


@contextmanager
def folder_lock(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder for this process. The operating system releases the lock when the process ends.

    Args:
        path: the folder; it is made if missing.
        patience: seconds to wait for another process to release the lock.
    """
    deadline = time.monotonic() + patience
    while (file := _lock(path)) is None:
        if time.monotonic() >= deadline:
            raise InputError(f"{path}: another process is at work there; wait for it, or end it")
        time.sleep(0.1)
    with file:
        try:
            yield
        finally:
            if sys.platform != "win32":  # Windows cannot remove an open file
                (path / LOCK_FILE).unlink(missing_ok=True)  # before the release: the next process makes a new one


def is_locked(path: Path) -> bool:
    """Whether a process has locked a folder; True if the system cannot tell."""
    if sys.platform == "win32":
        return True
    try:
        with (path / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several processes may ask at once
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock(path: Path) -> IO[bytes] | None:
    """Open and lock a folder's lock file; None if another process holds it."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            file = (path / LOCK_FILE).open("ab")
        except OSError as error:
            raise InputError(f"--out {path}: cannot be made ({error.strerror})") from error
        try:
            _acquire(file)
            if os.path.samestat(os.fstat(file.fileno()), (path / LOCK_FILE).stat()):
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass
        except OSError as error:
            file.close()
            raise InputError(f"{path}: the file system has no locks ({error.strerror})") from error
        file.close()  # the previous owner removed the file after it was opened here: try again


def _acquire(file: IO[bytes]) -> None:
    if sys.platform != "win32":  # Windows has no flock: two runs in one folder are not detected there
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
