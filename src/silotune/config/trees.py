"""Read YAML and `key=value` words as nested dictionaries ("trees"), and put one layer of them over another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from silotune.config.schema import Config
from silotune.config.section import Choice, Section, has_effect
from silotune.core.files import decode_text, load_yaml
from silotune.errors import InputError, file_errors

Tree = dict[str, Any]

SECTIONS: dict[str, type[Section] | type[Choice]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, (Choice, Section))
}
"""The groups of keys of a configuration."""

NAMED = tuple(name for name, section in SECTIONS.items() if "name" in section.model_fields)
"""The sections for which `x=name` is short for `x.name=name`."""


_COMMENT = re.compile(r"(^|\s)#")
"""Where YAML would take the rest of a line as a comment."""

_YAML = ("'", '"', "[", "{")
"""How a value begins in which YAML itself tells text from comments."""


def load_tree(path: Path) -> Tree:
    """Read a YAML file as a tree."""
    if not path.is_file():
        raise InputError(f"config file {path}: no such file")
    try:
        with file_errors(f"config {path}: cannot be read"):
            text = decode_text(path.read_bytes())
    except UnicodeDecodeError as error:
        raise InputError(f"config {path}: not UTF-8 (byte {error.start})") from error
    return parse_tree(text, str(path))


def parse_tree(text: str, source: str) -> Tree:
    """Parse YAML as a tree."""
    try:
        loaded = load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise InputError(f"config {source}:{line} not valid YAML ({getattr(error, 'problem', error)})") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InputError(f"config {source}: must be a mapping of keys, not a {type(loaded).__name__}")
    # an empty section (e.g. one that is commented out) counts as absent
    return nested((key, value) for key, value in loaded.items() if key not in SECTIONS or value is not None)


def parse_word(text: str) -> tuple[str, Any]:
    """Split a `key=value` word of a command line; the value is parsed as YAML, but a template is text as it stands."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"expected key=value, got {text!r}")
    if _COMMENT.search(value) and value.lstrip()[:1] not in _YAML:
        return key, value
    try:
        parsed = load_yaml(value)
    except (yaml.YAMLError, ValueError):
        return key, value
    return key, value if key == "head.template" and not _is_template(value, parsed) else parsed


def _is_template(value: str, parsed: Any) -> bool:
    by_task = isinstance(parsed, dict) and all(isinstance(text, str) for text in parsed.values())
    return by_task or parsed is None or value.lstrip()[:1] in ("'", '"')


def nested(pairs: Iterable[tuple[Any, Any]]) -> Tree:
    """Make a tree of (dotted key, value) pairs."""
    tree: Tree = {}
    for key, value in pairs:
        _set(tree, str(key), value)
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a tree; lists and empty groups are values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key; `x=name` for a named section means `x.name=name`."""
    *path, last = key.split(".")
    if not path and last in SECTIONS:
        if isinstance(value, dict):
            for inner, item in value.items():
                _set(tree, f"{last}.{inner}", item)
            return
        if last in NAMED:
            path, last = [last], "name"
    for word in path:
        tree = tree.setdefault(word, {})
        if not isinstance(tree, dict):
            raise InputError(f"{key}: {word!r} already has a plain value")
    tree[last] = value


def plain(value: object, key: str) -> Any:
    """Return a value of Python as YAML would give it: paths become text, tuples lists."""
    if isinstance(value, Mapping):
        return {str(name): plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{key}.{position}") for position, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    raise InputError(
        f"{key}: must be text, a number, true or false, a list or a group of keys (got {type(value).__name__})"
    )


def merged(layers: Sequence[Mapping[str, Any]]) -> Tree:
    """Merge layers of keys; later layers take precedence."""
    result: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(result.get(key), dict):
                before = result[key]
                if key in NAMED and "name" in value and value["name"] != before.get("name"):
                    # Another name brings other options: the earlier ones would not fit it.
                    kind, own, before = SECTIONS[key], before, {}
                    if issubclass(kind, Section):
                        fitting = (option for option in kind.common if has_effect(kind, option, value["name"]))
                        before = {option: own[option] for option in fitting if option in own}
                result[key] = merged([before, value])
            else:
                result[key] = merged([value]) if isinstance(value, dict) else value
    return result
