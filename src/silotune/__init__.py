"""silotune: federated parameter-efficient fine-tuning of language models across data silos."""

from silotune.errors import InputError, SilotuneError

__all__ = ["InputError", "PersonalModel", "Run", "SilotuneError", "load_run", "read_config", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load what trains only when it is asked for: importing torch takes seconds."""
    if name in {"Run", "run"}:
        from silotune import experiment

        return getattr(experiment, name)
    if name == "PersonalModel":
        from silotune.personal import PersonalModel

        return PersonalModel
    if name == "load_run":
        from silotune.finished import load_run

        return load_run
    if name == "read_config":
        from silotune.assembly.configuration import read_config

        return read_config
    raise AttributeError(f"module 'silotune' has no attribute {name!r}")
