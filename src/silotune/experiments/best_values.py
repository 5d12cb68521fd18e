"""What a sweep found best, as the words that give it to a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from silotune.config.merging import read_tree
from silotune.core.files import write_text
from silotune.errors import InputError

FILE = "best.yaml"


def to_words(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """`key=value` words of dotted keys and their values."""
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items())


def write_best(out: Path, best: Mapping[str, Mapping[str, Any]], remark: str) -> Path:
    """Leave method → best values as a YAML that is also the `per_method` of a configuration."""
    comment = "".join(f"# {line}\n" for line in remark.splitlines())
    tree = {"per_method": {method: dict(keys) for method, keys in best.items()}}
    path = out / FILE
    write_text(path, comment + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return path


def read_best(folders: Iterable[str], methods: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Method → the words of its best values, from folders of sweeps (or their YAML files); later ones win.

    Raises:
        InputError: no sweep there, or none of them has a method (it would be compared at other than its best).
    """
    found: dict[str, tuple[str, ...]] = {}
    named = list(folders)
    if not named:
        return {}
    for name in named:
        path = Path(name) / FILE if Path(name).is_dir() else Path(name)
        if not path.is_file():
            raise InputError(f"best={name}: no finished sweep there (no {FILE})")
        entries = read_tree(path).get("per_method")
        if not isinstance(entries, dict) or not all(isinstance(keys, dict) for keys in entries.values()):
            raise InputError(f"best={name}: {path.name} must map methods to groups of keys under per_method")
        found |= {str(method): to_words(keys) for method, keys in entries.items()}
    missing = [method for method in methods if method not in found]
    if missing:
        raise InputError(
            f"best={','.join(named)}: has nothing for method {missing[0]!r}, only for {', '.join(found)}; sweep it too"
        )
    return found
