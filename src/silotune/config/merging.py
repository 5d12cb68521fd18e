"""Reads YAML and `key=value` words as nested dictionaries ("trees") and merges layers of them, before any check."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from silotune.config.schema import Config
from silotune.config.section import Choice, Section, has_effect
from silotune.errors import InputError

Tree = dict[str, Any]

SECTIONS: dict[str, type[Section] | type[Choice]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, (Choice, Section))
}
"""The groups of keys of a configuration."""

NAMED = tuple(name for name, section in SECTIONS.items() if "name" in section.model_fields)
"""The sections for which `x=name` is short for `x.name=name`."""


_MOST_BYTES = 32 * 2**20
"""Size of the largest configuration that is read; tens of thousands of silos fit in."""

_MOST_VALUES = 2_000_000
"""Values of the largest configuration. A short YAML file can hold more than any memory by aliases of aliases."""


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the last one winning."""

    def construct_document(self, node: yaml.Node) -> Any:
        if _expanded_size(node, {}) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_VALUES} values, with aliases in place", node.start_mark
            )
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a YAML document in which every alias is replaced by a copy.

    Raises:
        RecursionError: an alias holds itself.
    """
    if id(node) not in sizes:
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [item for pair in inner for item in pair] if isinstance(node, yaml.MappingNode) else inner
        sizes[id(node)] = 1 + sum(_expanded_size(item, sizes) for item in nodes)
    return sizes[id(node)]


def read_tree(path: Path) -> Tree:
    """Read a YAML file as a tree; its paths are relative to the file.

    Raises:
        InputError: if it cannot be read, or is not a YAML mapping in UTF-8.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"config {path}: larger than {_MOST_BYTES >> 20} MiB")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"config {path}: not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"config {path}: cannot be read ({error.strerror})") from error
    return absolute(parse_tree(text, str(path)), path.parent)


def parse_tree(text: str, source: str) -> Tree:
    """Parse YAML as a tree.

    Raises:
        InputError: naming `source` and the line.
    """
    try:
        loaded = yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError:
        raise InputError(f"config {source}: not valid YAML (nested too deeply)") from None
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
    """Split a `key=value` word of a command line; the value is parsed as YAML.

    Raises:
        InputError: without a key or an equals sign.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"expected key=value, got {text!r}")
    try:
        return key.strip(), yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return key.strip(), value


def nested(pairs: Iterable[tuple[Any, Any]]) -> Tree:
    """Make a tree of (dotted key, value) pairs."""
    tree: Tree = {}
    for key, value in pairs:
        _set(tree, str(key), value)
    return tree


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


HUB_PREFIX = "hub:"
"""How the path of a silo's data set on the Hugging Face hub begins."""


def absolute(tree: Tree, folder: Path) -> Tree:
    """Make the tree's paths absolute, relative to a folder: a resolved configuration works from anywhere.

    This includes the paths in `per_method` and `compare.variants`. A backbone counts as a path only if the path exists;
    otherwise it may be an id of the hub.
    """
    data = tree.get("data")
    if isinstance(data, dict):
        resolve(data, "path", folder)
    silos = tree.get("silos")
    for silo in silos if isinstance(silos, list) else []:
        if isinstance(silo, dict) and not str(silo.get("path")).startswith(HUB_PREFIX):
            resolve(silo, "path", folder)
    compare = tree.get("compare")
    if isinstance(compare, dict):
        best = compare.get("best")
        folders = best.split(",") if best and isinstance(best, str) else best
        if isinstance(folders, list):
            compare["best"] = [_resolved(path.strip() if isinstance(path, str) else path, folder) for path in folders]
        _entries(compare, "variants", folder)
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


def merged(layers: Sequence[Mapping[str, Any]]) -> Tree:
    """Merge layers of keys; later layers take precedence."""
    result: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(result.get(key), dict):
                before = result[key]
                if key in NAMED and "name" in value and value["name"] != before.get("name"):
                    # Another name brings other options: the earlier ones would not fit it.
                    before = {
                        option: before[option] for option in _kept_options(key, value["name"]) if option in before
                    }
                result[key] = merged([before, value])
            else:
                result[key] = merged([value]) if isinstance(value, dict) else value
    return result


def _kept_options(section: str, chosen: Any) -> list[str]:
    kind = SECTIONS[section]
    return [key for key in kind.common if has_effect(kind, key, chosen)] if issubclass(kind, Section) else []
