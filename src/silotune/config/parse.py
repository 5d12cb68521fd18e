"""From presets, YAML files and `key=value` words to one checked `Config`.

Layers, each over the one before: the schema's defaults, the preset, what the method brings along, the preset's
`per_method` entry, the user's file (with its own `per_method`), the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from silotune.config.schema import Choice, Config, Section
from silotune.errors import InputError, unknown

Tree = dict[str, Any]
NAMED = tuple(
    name
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type)
    and issubclass(field.annotation, (Choice, Section))
    and "name" in field.annotation.model_fields
)
"""The sections for which `x=name` is short for `x.name=name`."""


def preset_names() -> list[str]:
    """The presets, in alphabetic order."""
    folder = resources.files("silotune") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """A preset's YAML.

    Raises:
        InputError: for an unknown name.
    """
    if name not in preset_names():
        raise unknown("preset", name, preset_names())
    return (resources.files("silotune") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def load_config(
    source: str, overrides: Sequence[str] = (), method_defaults: Mapping[str, Mapping[str, object]] = {}
) -> Config:
    """The configuration of a run.

    Args:
        source: a preset's name or the path of a YAML file (which may name a preset as its base: `preset: NAME`).
        overrides: `key=value` words, dotted keys.
        method_defaults: method id → what the method brings along, by dotted key.

    Raises:
        InputError: one line that names the key and what is allowed.
    """
    base, user = _source(source)
    words = [_word(text) for text in overrides]
    command: Tree = {}
    for key, value in words:
        _set(command, key, value)
    chosen = _merged([base, user, command]).get("method", {})
    method = str(chosen.get("name", "")) if isinstance(chosen, dict) else ""
    brought: Tree = {}
    for key, value in method_defaults.get(method, {}).items():
        _set(brought, key, value)
    choice: Tree = {"method": {"name": method}} if method else {}
    layers = [base, choice, brought, _per_method(base, method), user, _per_method(user, method), command]
    return validated(_merged(layers))


def validated(tree: Tree) -> Config:
    """Check a tree against the schema.

    Raises:
        InputError: one line for the first error.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise input_error(error, Config) from None


def dump(config: Config) -> str:
    """The resolved configuration as YAML; reading it back gives the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude={"per_method"}), sort_keys=False, allow_unicode=True)


def input_error(error: ValidationError, model: type[BaseModel], prefix: str = "") -> InputError:
    """The first complaint of pydantic as one line: key, what is allowed, what was given."""
    first = error.errors()[0]
    location = [str(word) for word in first["loc"] if not str(word).startswith(("tuple[", "str", "function"))]
    key = ".".join([*([prefix] if prefix else []), *location])
    if first["type"] == "extra_forbidden":
        allowed = _fields_at(model, location[:-1])
        return unknown(
            "key", key, [".".join([*([prefix] if prefix else []), *location[:-1], name]) for name in allowed]
        )
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" or not key:
        return InputError(f"{key}: {message}" if key else message)
    given = first.get("input")
    shown = "" if isinstance(given, (dict, list)) else f" (got {given!r})"
    return InputError(f"{key}: {message[0].lower()}{message[1:]}{shown}")


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    for word in location:
        if word.isdigit():
            continue
        annotation: Any = model.model_fields[word].annotation if word in model.model_fields else None
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _source(source: str) -> tuple[Tree, Tree]:
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise InputError(f"config file {source}: not found")
        user = _tree(_read(path), source)
        name = user.pop("preset", None)
        return (_tree(preset_text(str(name)), str(name)) if name else {}), _absolute(user, path.parent)
    return _tree(preset_text(source), source), {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"config file {path}: not UTF-8 (byte {error.start})") from error


def _tree(text: str, source: str) -> Tree:
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"config {source}:{line} is not YAML ({getattr(error, 'problem', error)})") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InputError(f"config {source}: must be a mapping of keys")
    tree: Tree = {}
    for key, value in loaded.items():
        _set(tree, str(key), value)
    return tree


def _absolute(tree: Tree, folder: Path) -> Tree:
    """Paths in a file are relative to the file."""
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("path"), str):
        data["path"] = str((folder / data["path"]).resolve())
    for silo in tree.get("silos") or []:
        if isinstance(silo, dict) and isinstance(silo.get("path"), str):
            silo["path"] = str((folder / silo["path"]).resolve())
    return tree


def _word(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"expected key=value, got {text!r}")
    try:
        return key, yaml.safe_load(value) if value else None
    except yaml.YAMLError:
        return key, value


def _set(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key; `x=name` for a named section means `x.name=name`."""
    *path, last = key.split(".")
    if not path and last in NAMED and not isinstance(value, dict):
        path, last = [last], "name"
    if not path and isinstance(value, dict) and last not in ("per_method",):
        for inner, item in value.items():
            _set(tree, f"{last}.{inner}", item)
        return
    for word in path:
        tree = tree.setdefault(word, {})
        if not isinstance(tree, dict):
            raise InputError(f"{key}: {word!r} already has a plain value")
    tree[last] = value


def _per_method(tree: Tree, method: str) -> Tree:
    result: Tree = {}
    for key, value in (tree.get("per_method", {}).get(method) or {}).items():
        _set(result, str(key), value)
    return result


def _merged(layers: Sequence[Tree]) -> Tree:
    result: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(result.get(key), dict):
                # Another name brings other options: the earlier ones would not fit it.
                renamed = key in NAMED and "name" in value and value["name"] != result[key].get("name")
                result[key] = _merged([{} if renamed else result[key], value])
            else:
                result[key] = _merged([value]) if isinstance(value, dict) else value
    return result
