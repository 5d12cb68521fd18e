"""Refuse systems and settings on which processes and their sockets cannot work, before anything is started."""

from __future__ import annotations

import os
import socket
import tempfile

from silotune.errors import InputError

_LONGEST_TMPDIR = 72
"""Bytes of the path of the folder for temporary files; those of a socket in it may be 104."""


def require_short_tmpdir() -> None:
    """Refuse a folder for temporary files in which paths of Unix sockets would be longer than systems allow."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_TMPDIR:
        raise InputError(
            f"TMPDIR: {folder} is too long for the sockets of processes; set TMPDIR to a folder whose path has at most "
            f"{_LONGEST_TMPDIR} bytes (TMPDIR=/tmp)"
        )


def require_posix(what: str) -> None:
    """Refuse a feature that needs Unix sockets and POSIX processes on a system without them."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "fork"):
        raise InputError(
            f"{what}: cannot run here, as it needs Linux or macOS; on Windows use WSL (`wsl --install`), and silotune "
            "there"
        )
