"""Read presets, files and `key=value` words into one checked `Config`, write it as YAML, and compare two of them.

Layers, each over the one before: the schema's defaults, the preset, the method's defaults, the preset's `per_method`
entry, the user's file, its `per_method` entry, the command line, its `per_method` entry, and the changes of one row of
a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from silotune.config.backbone import as_stored
from silotune.config.data import DATA_SOURCES
from silotune.config.head import PLAIN
from silotune.config.paths import absolute, read_tree, resolve
from silotune.config.registries import METHODS, TUNERS
from silotune.config.schema import Config
from silotune.config.section import Choice, Section, input_error, shown
from silotune.config.tables import silo_entries
from silotune.config.trees import NAMED, Tree, flat, load_tree, merged, nested, parse_tree, parse_word, plain
from silotune.config.validators import is_name
from silotune.core.files import dump_yaml
from silotune.errors import InputError, require_known, unknown_name_error


def preset_names() -> list[str]:
    """Return the names of the presets in alphabetic order."""
    return sorted(_preset_files())


def preset_text(name: str) -> str:
    """Return a preset's YAML."""
    files = _preset_files()
    require_known("preset", name, files, or_else="or the path of a YAML file")
    return files[name].read_text(encoding="utf-8")


def preset_tree(name: str, base: str | None = None) -> Tree:
    """Return a preset's keys, laid over the keys of its base if it names one (`preset: NAME`).

    The base's comparison is not taken along: rows belong to the preset that lists them.
    """
    tree = parse_tree(preset_text(name), name)
    named = tree.pop("preset", None)
    if named is None:
        if base is not None:
            raise InputError(f"preset={base}: preset {name!r} has no base that another could stand for")
        return tree
    below = preset_tree(str(base or named))
    below.pop("compare", None)
    return merged([below, tree])


def _preset_files() -> dict[str, Traversable]:
    """Return preset name → file. Folders group presets by paper and are not part of the names."""
    folders = (resources.files("silotune") / "presets").iterdir()
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}


def load_config(
    source: str | Mapping[str, object],
    overrides: Sequence[str] = (),
    changes: Sequence[str] = (),
    keys: Mapping[str, object] = {},
) -> Config:
    """Return the checked configuration of a run: of a preset, a YAML file or the keys of a `Config`, and of words.

    A file may name a preset as its base (`preset: NAME`). Overrides are `key=value` words with dotted keys; changes
    override all others, and in them `preset=NAME` puts the source over another preset. `keys` are as overrides, with
    values of Python: `{"rounds": 2, "train": {"lr": 1e-3}}`; `silos` may hold tables.
    """
    if "silos" in keys:
        keys = {**keys, "silos": silo_entries(keys["silos"])}
    pairs = (*map(parse_word, overrides), *((key, plain(value, key)) for key, value in keys.items()))
    words, last = (absolute(nested(pairs), Path()) for pairs in (pairs, map(parse_word, changes)))
    base = last.pop("preset", None)
    if isinstance(source, str):
        preset, file = _source(source, base) if source else ({}, {})
    else:
        tree = absolute(nested((key, plain(value, key)) for key, value in source.items()), Path())
        method = (words | last).get("method", {}).get("name")
        # keys of a `Config` of another method act as a preset's do: the new method's defaults replace them
        another = isinstance(method, str) and method != tree.get("method", {}).get("name")
        preset, file = (tree, {}) if another else ({}, tree)
    return validated(_layered(preset, file, words, last))


def _layered(preset: Tree, file: Tree, words: Tree, last: Tree) -> Tree:
    entries = [_per_method(tree) for tree in (preset, file, words)]
    for tree in (preset, file, words):
        tree.pop("per_method", None)
    changes = [*_take_silo_changes(words), *_take_silo_changes(last)]
    if (file | words | last).get("silos"):  # entries of `silos` replace a preset's data set and keep its setting
        preset = preset | {"data": {k: v for k, v in preset.get("data", {}).items() if k not in DATA_SOURCES}}
    # the schema's names of `method` and `tuner`, so that a layer may set their options alone
    defaults = {name: {"name": Config.model_fields[name].default.name} for name in NAMED}
    layers = [defaults, preset, file, words, last]
    method = _keep_one_method(layers)
    from_entries = [nested(entry.get(str(method), {}).items()) for entry in entries]
    of_method = nested(METHODS[method].defaults.items() if method in METHODS else ())
    choice = {"method": {"name": method}}
    tree = merged(
        [defaults, preset, choice, of_method, from_entries[0], file, from_entries[1], words, from_entries[2], last]
    )
    _change_silos(tree, changes)
    return tree


def _take_silo_changes(words: Tree) -> list[tuple[str, Any]]:
    """Remove the keys `silos.NAME.KEY` from a command line's tree, and return (`NAME.KEY`, value); a list stays."""
    return list(flat(words.pop("silos"))) if isinstance(words.get("silos"), dict) else []


def _change_silos(tree: Tree, changes: Sequence[tuple[str, Any]]) -> None:
    if not changes:
        return
    silos = tree.get("silos")
    entries = [silo for silo in silos if isinstance(silo, dict)] if isinstance(silos, list) else []
    if not entries:
        raise InputError(f"silos.{changes[0][0]}: this setting has no list of silos whose entries could be changed")
    by_name = {str(silo.get("name")): dict(silo) for silo in entries}
    for dotted, value in changes:
        # names may contain dots
        name = max((name for name in by_name if dotted.startswith(f"{name}.")), key=len, default=None)
        if name is None:
            raise unknown_name_error("silo in silos.NAME.KEY", dotted.partition(".")[0], by_name)
        key = dotted.removeprefix(f"{name}.")
        by_name[name][key] = value
        if key == "path":
            resolve(by_name[name], key, Path())
    tree["silos"] = [by_name[str(silo.get("name"))] if isinstance(silo, dict) else silo for silo in silos or []]


def _keep_one_method(layers: Sequence[Tree]) -> Any:
    """Return the method in effect after all layers; drop options that lower layers set for another method."""
    in_effect: list[Any] = []
    for layer in layers:
        section = layer.get("method", {})
        in_effect.append(section.get("name", in_effect[-1] if in_effect else None))
    for layer, method in zip(layers, in_effect, strict=True):
        if method != in_effect[-1]:
            layer.pop("method", None)
    return in_effect[-1]


def _per_method(tree: Tree) -> dict[str, dict[str, Any]]:
    entries = tree.get("per_method") or {}
    if not isinstance(entries, dict):
        raise InputError(f"per_method: must map methods to groups of keys (got {shown(entries)})")
    for name, entry in entries.items():
        if name not in METHODS:
            raise unknown_name_error("key", f"per_method.{name}", [f"per_method.{method}" for method in METHODS])
        if not isinstance(entry, dict):
            raise InputError(f"per_method.{name}: must be a group of keys (got {shown(entry)})")
        if "name" in nested(entry.items()).get("method", {}):
            raise InputError(f"per_method.{name}: cannot choose another method")
    return entries


def validated(tree: Tree) -> Config:
    """Check a tree against the schema."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise input_error(error, Config, silos=_silo_names(tree)) from None


def load_resolved(path: Path) -> Config:
    """Return the configuration that `dump` wrote into a run folder; its layers were merged when the run began.

    Sections that equal the schema's defaults are left to the schema, which does not check its defaults again.
    """
    tree = {}
    for key, entry in load_tree(path).items():
        value = as_stored(entry) if key == "backbone" else entry
        default = _dumped_defaults().get(key)
        is_default = isinstance(value, dict) and isinstance(default, dict) and value.items() <= default.items()
        if not is_default:
            tree[key] = value
    return validated(tree)


@cache
def _dumped_defaults() -> Tree:
    """Return section → its keys with their defaults, as `dump` writes them."""
    sections = {name: field.default for name, field in Config.model_fields.items()}
    return {name: value.model_dump(mode="json") for name, value in sections.items() if isinstance(value, Section)}


def _silo_names(tree: Tree) -> list[str]:
    """Return the name of each entry of `silos`, as `silos.NAME.KEY` on a command line; its number if it has none."""
    silos = tree.get("silos")
    names = [silo.get("name") if isinstance(silo, dict) else None for silo in silos] if isinstance(silos, list) else []
    return [name if isinstance(name, str) and is_name(name) else str(number) for number, name in enumerate(names)]


def dump(config: Config) -> str:
    """Return a resolved configuration as YAML; reading it back gives the same run."""
    return dump_yaml(config.model_dump(mode="json", exclude={"per_method", "compare"}))


def differences(before: str, after: str) -> list[str]:
    """Return the keys in which two configurations differ, as `section.key: old → new`.

    Keys that one text lacks have their defaults. The description does not count.
    """
    if before == after:
        return []
    old, new = (dict(flat(_all_values(validated(parse_tree(text, "of the run"))))) for text in (before, after))
    names = dict.fromkeys([*old, *new])
    return [f"{name}: {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def _all_values(config: Config) -> Tree:
    """Return all keys, options at their defaults too; silos by name, so that a difference names one silo's key."""
    tree = config.model_dump(mode="json", exclude={"description"})
    for section, registry in (("method", METHODS), ("tuner", TUNERS)):
        choice: Choice = getattr(config, section)
        options = registry.find(choice.name).Options.model_validate(choice.options)
        tree[section] |= options.model_dump(mode="json")
    if config.head.writes:  # what no template meant before it followed from the model
        tree["head"]["template"] = config.head.template or PLAIN
    silos = {silo["name"]: silo for silo in tree["silos"]}
    return tree | {"silos": {"(order)": ", ".join(silos)} | silos}


def _source(source: str, base: object = None) -> tuple[Tree, Tree]:
    """Return the keys of the preset and of the user's file; `base` replaces the preset that the source names."""
    path = Path(source)
    other = None if base is None else str(base)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        file = read_tree(path)
        name = file.pop("preset", None)
        if other is not None and name is None:
            raise InputError(f"preset={other}: {source} names no preset that another could stand for")
        return (preset_tree(str(other or name)) if name else {}), file
    return preset_tree(source, other), {}
