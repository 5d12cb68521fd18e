"""`read_tree` reads a YAML file of keys; `absolute` and `resolve` make the paths in it absolute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from silotune.config.tables import MEMORY_PREFIX
from silotune.config.trees import Tree, load_tree, nested
from silotune.errors import InputError

HUB_PREFIX = "hub:"
"""How the path of a silo's data set on the Hugging Face hub begins."""


def read_tree(path: Path) -> Tree:
    """Read a YAML file as a tree; its paths are relative to the file."""
    return absolute(load_tree(path), path.parent)


def absolute(tree: Tree, folder: Path) -> Tree:
    """Make the tree's paths absolute, relative to a folder: a resolved configuration works from anywhere.

    This includes the paths in `per_method`, `compare.variants` and `compare.grid`. A backbone counts as a path only if
    the path exists; otherwise it may be an id of the hub.
    """
    data = tree.get("data")
    if isinstance(data, dict):
        resolve(data, "path", folder)
    silos = tree.get("silos")
    for silo in silos if isinstance(silos, list) else []:
        if isinstance(silo, dict) and not is_elsewhere(silo.get("path")):
            resolve(silo, "path", folder)
    compare = tree.get("compare")
    if isinstance(compare, dict):
        best = compare.get("best")
        folders = best.split(",") if best and isinstance(best, str) else best
        if isinstance(folders, list):
            compare["best"] = [_resolved(path.strip() if isinstance(path, str) else path, folder) for path in folders]
        _entries(compare, "variants", folder)
        grid = compare.get("grid")
        if isinstance(grid, dict):
            for group in list(grid):
                _entries(grid, group, folder)
    _entries(tree, "per_method", folder)
    federation = tree.get("federation")
    if isinstance(federation, dict):
        resolve(federation, "labelled", folder)
    privacy = tree.get("privacy")
    if isinstance(privacy, dict):
        resolve(privacy, "secret", folder)
    resolve(tree, "start", folder)
    resolve_backbone(tree, folder)
    return tree


def is_elsewhere(path: object) -> bool:
    """Return whether a silo's path names no file: a data set of the hub, or a table in memory."""
    return str(path).startswith((HUB_PREFIX, MEMORY_PREFIX))


def _entries(tree: Tree, key: str, folder: Path) -> None:
    """Make the paths in each entry of a mapping from names to groups of keys absolute."""
    if isinstance(tree.get(key), dict):
        tree[key] = {
            name: absolute(nested(entry.items()), folder) if isinstance(entry, dict) else entry
            for name, entry in tree[key].items()
        }


def resolve(tree: Tree, key: str, folder: Path) -> None:
    """Make one key's path absolute, if the key is set; the schema refuses values that are no text later."""
    if key in tree:
        tree[key] = _resolved(tree[key], folder)


def resolve_backbone(tree: Tree, folder: Path) -> None:
    """Make a backbone's path absolute if there is such a path; it may be an id of the hub."""
    backbone = tree.get("backbone")
    if not isinstance(backbone, dict):
        return
    name = backbone.get("name")
    if isinstance(name, str) and name not in ("", "default") and _under(folder, name).exists():
        resolve(backbone, "name", folder)


def _resolved(value: Any, folder: Path) -> Any:
    if isinstance(value, str) and value and "\0" not in value:
        return str(_under(folder, value).resolve())
    return value


def _under(folder: Path, path: str) -> Path:
    try:
        return folder / Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: no user of this name has a home; allowed: ~/…, or a path without ~") from error
