"""The public names of silotune: federated parameter-efficient fine-tuning of language models across data silos.

What `__init__.pyi` beside this file names is public. Other names may move in a minor release.
"""

from __future__ import annotations

import ast
import os
from importlib import import_module
from pathlib import Path

if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
    # OpenMP's idle threads spin for milliseconds by default and take the cores from the threads that they wait for. A
    # sixtieth of GNU's default is enough for the gap between two operations of a step; with 0 a step takes a fifth
    # longer. OpenMP reads this when torch is imported, here and in processes that this one starts.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = "5000"

_MODULES = {
    name.name: str(line.module)
    for line in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}
"""Public name → the module that it is imported from on first use: importing torch takes seconds."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'silotune' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
