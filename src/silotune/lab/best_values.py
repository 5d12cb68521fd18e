"""`write_best` and `read_best`: a sweep's best values as `best.yaml`, and as a run's `key=value` words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silotune.config.paths import read_tree
from silotune.core.files import write_text
from silotune.core.yaml_text import dump_yaml
from silotune.errors import InputError

BEST_FILE = "best.yaml"


def to_words(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Convert dotted keys and values to `key=value` words."""
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items())


def write_best(out: Path, best: Mapping[str, Mapping[str, Any]], remark: str) -> Path:
    """Write method to best values as YAML; the file can also serve as `per_method` of a configuration.

    Args:
        out: the sweep's folder.
        best: method to dotted keys and values.
        remark: comment at the top of the file.

    Returns:
        Path of the file.
    """
    comment = "".join(f"# {line}\n" for line in remark.splitlines())
    tree = {"per_method": {method: dict(keys) for method, keys in best.items()}}
    path = out / BEST_FILE
    write_text(path, comment + dump_yaml(tree))
    return path


def read_best(folders: Iterable[str], methods: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read the best values of methods from sweeps; later folders take precedence.

    Args:
        folders: folders of sweeps, or their YAML files.
        methods: methods that are compared.

    Returns:
        Method to the words of its best values.
    """
    best: dict[str, tuple[str, ...]] = {}
    sources = list(folders)
    if not sources:
        return {}
    for name in sources:
        path = Path(name) / BEST_FILE if Path(name).is_dir() else Path(name)
        if not path.is_file():
            raise InputError(f"best={name}: no finished sweep there (no {BEST_FILE})")
        entries = read_tree(path).get("per_method")
        if not isinstance(entries, dict) or not all(isinstance(keys, dict) for keys in entries.values()):
            raise InputError(f"best={name}: {path.name} must map methods to groups of keys under per_method")
        best |= {str(method): to_words(keys) for method, keys in entries.items()}
    missing = [method for method in methods if method not in best]
    if missing:
        raise InputError(
            f"best={','.join(sources)}: has nothing for method {missing[0]!r}, only for {', '.join(best)}; sweep it too"
        )
    return best
