"""One process at a time in a folder: two coordinators that write the same run would leave neither's."""

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
"""The file by which a folder is claimed; there as long as it is."""


@contextmanager
def folder_lock(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Have a folder for oneself. The system lets go of it when this process ends, in whatever way.

    Args:
        path: the folder; made where there is none.
        patience: seconds to wait for another process that has it.

    Raises:
        InputError: another process (or another run of this one) has it, or it cannot be made.
    """
    until = time.monotonic() + patience
    while (file := _lock(path)) is None:
        if time.monotonic() >= until:
            raise InputError(f"{path}: another process is at work there; wait for it, or end it")
        time.sleep(0.1)
    with file:
        try:
            yield
        finally:
            if sys.platform != "win32":  # where an open file cannot be removed
                (path / LOCK_FILE).unlink(missing_ok=True)  # while it is ours: whoever comes next makes a new one


def is_locked(path: Path) -> bool:
    """Whether a process has a folder; True where the system cannot say."""
    if sys.platform == "win32":
        return True
    try:
        with (path / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for this moment: others may look as well
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock(path: Path) -> IO[bytes] | None:
    """The lock of a folder, open; None where another has it."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            file = (path / LOCK_FILE).open("ab")
        except OSError as error:
            raise InputError(f"--out {path}: cannot be made ({error.strerror})") from error
        try:
            _take(file)
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
        file.close()  # whoever had it has removed it


def _take(file: IO[bytes]) -> None:
    if sys.platform != "win32":  # where there is no such lock, two runs in one folder are not kept apart
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
