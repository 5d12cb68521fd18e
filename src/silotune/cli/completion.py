"""Complete presets, keys and run folders in a shell (`silotune --install-completion`)."""

from __future__ import annotations

from pathlib import Path


def complete_source(incomplete: str) -> list[str]:
    """Return the presets and YAML files that begin so."""
    from silotune.config import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)] + _files(incomplete, ".yaml")


def complete_key(incomplete: str) -> list[str]:
    """Return the keys and sections that begin so."""
    from silotune.config.reference import all_keys, sections

    return [name for name in (*filter(None, sections()), *all_keys()) if name.startswith(incomplete)]


def complete_word(incomplete: str) -> list[str]:
    """Return `key=` of the keys that begin so, and the methods after `method=`."""
    import silotune.methods
    import silotune.models.tuners  # noqa: F401 (both fill the registries)
    from silotune.config.reference import all_keys
    from silotune.config.registries import METHODS, TUNERS

    for section, registry in (("method", METHODS), ("tuner", TUNERS)):
        if incomplete.startswith(f"{section}="):
            return [word for name in registry if (word := f"{section}={name}").startswith(incomplete)]
    return [word for name in all_keys() if (word := f"{name}=").startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the run folders and folders of runs that begin so."""
    parent = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    folders = sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    return [str(path) for path in folders if str(path).startswith(incomplete)]


def _files(incomplete: str, suffix: str) -> list[str]:
    parent = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    files = sorted(parent.glob(f"*{suffix}")) if parent.is_dir() else []
    return [str(path) for path in files if str(path).startswith(incomplete)]
