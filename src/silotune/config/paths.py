"""Make the paths in a configuration absolute, so that a resolved configuration works from any folder."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from silotune.config.schema import Config
from silotune.config.tables import MEMORY_PREFIX
from silotune.config.trees import Tree, load_tree, nested
from silotune.config.validators import GROUP_OF_KEYS, PathKind, listed
from silotune.errors import InputError

HUB_PREFIX = "hub:"
"""How the path of a silo's data set on the Hugging Face hub begins."""


def read_tree(path: Path) -> Tree:
    """Read a YAML file as a tree; its paths are relative to the file."""
    return absolute(load_tree(path), path.parent)


def absolute(tree: Tree, folder: Path, model: type[BaseModel] = Config) -> Tree:
    """Make a tree's paths absolute: the values of all keys that the schema marks as `ConfigPath` or `PathOrName`."""
    for key in tree.keys() & model.model_fields.keys():
        field = model.model_fields[key]
        tree[key] = _absolute(tree[key], Annotated[field.annotation, None, *field.metadata], folder)
    return tree


def _absolute(value: Any, kind: Any, folder: Path) -> Any:
    """Return a value of the schema's type `kind` with its paths absolute; the schema refuses wrong types later."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if GROUP_OF_KEYS in arguments and isinstance(value, dict):
            return absolute(nested(value.items()), folder)
        if isinstance(value, str) and (marks := _path_kinds(kind)):
            return _resolved(value, marks[0], folder)
        return _absolute(value, arguments[0], folder)
    if origin in (Union, UnionType):
        for argument in arguments:
            value = _absolute(value, argument, folder)
    elif origin is list:
        items = listed(value) if _path_kinds(arguments[0]) else value
        return [_absolute(item, arguments[0], folder) for item in items] if isinstance(items, list) else value
    elif origin is dict and isinstance(value, dict):
        return {name: _absolute(item, arguments[1], folder) for name, item in value.items()}
    elif isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
        return absolute(value, folder, kind)
    return value


def _path_kinds(kind: Any) -> list[PathKind]:
    return [mark for mark in get_args(kind) if isinstance(mark, PathKind)]


def resolve(tree: Tree, key: str, folder: Path) -> None:
    """Make one key's path absolute, if the key is set; the schema refuses values that are no text later."""
    if isinstance(tree.get(key), str):
        tree[key] = _resolved(tree[key], PathKind(), folder)


def _resolved(value: str, kind: PathKind, folder: Path) -> str:
    if not value or value in kind.names or value.startswith((HUB_PREFIX, MEMORY_PREFIX)):
        return value
    try:
        path = folder / Path(value).expanduser()
    except RuntimeError as error:
        raise InputError(f"{value}: no user of this name has a home; allowed: ~/…, or a path without ~") from error
    return str(path.resolve()) if kind.always or path.exists() else value
