"""silotune: federated parameter-efficient fine-tuning of language models across data silos."""

from importlib import import_module

from silotune.errors import InputError, SilotuneError

__all__ = ["InputError", "PersonalModel", "Run", "SilotuneError", "load_run", "read_config", "run"]
__version__ = "0.1.0"


_FROM = {
    "PersonalModel": "silotune.personal",
    "Run": "silotune.experiment",
    "load_run": "silotune.finished",
    "read_config": "silotune.assembly.configuration",
    "run": "silotune.experiment",
}


def __getattr__(name: str) -> object:
    """Load what trains only when it is asked for: importing torch takes seconds."""
    if name not in _FROM:
        raise AttributeError(f"module 'silotune' has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
