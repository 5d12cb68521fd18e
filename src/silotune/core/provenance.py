"""What a result was made on, for records: processor, commit of the source, installed packages."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


@cache
def made_on() -> dict[str, Any]:
    """Return the processor, the commit of the source, and name → version of all installed packages."""
    installed = {str(package.metadata["Name"]): package.version for package in distributions()}
    packages = dict(sorted(installed.items(), key=lambda each: each[0].lower()))
    return {"processor": _processor(), "commit": _commit(), "packages": packages}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the source that runs, with `-dirty` if files differ; None where it is no checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
