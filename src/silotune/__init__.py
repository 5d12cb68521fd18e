"""silotune: federated parameter-efficient fine-tuning of language models across data silos."""

from __future__ import annotations

from importlib import import_module

from silotune.errors import InputError, SilotuneError
from silotune.version import __version__

__all__ = ["InputError", "PersonalModel", "Run", "SilotuneError", "__version__", "load_run", "read_config", "run"]

_FROM = {
    "PersonalModel": "silotune.runs.personal_model",
    "Run": "silotune.runs.run",
    "load_run": "silotune.runs.load",
    "read_config": "silotune.runs.build.resolve",
    "run": "silotune.runs.run",
}


def __getattr__(name: str) -> object:
    """Load what trains only when it is asked for: importing torch takes seconds."""
    if name not in _FROM:
        raise AttributeError(f"module 'silotune' has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
