"""Find presets by name and read their keys."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

from silotune.config.trees import Tree, merged, parse_tree
from silotune.errors import InputError, unknown_name_error


def preset_names() -> list[str]:
    """Return the names of the presets in alphabetic order."""
    return sorted(_preset_files())


def preset_text(name: str) -> str:
    """Return a preset's YAML."""
    files = _preset_files()
    if name not in files:
        raise unknown_name_error("preset", name, sorted(files), or_else="or the path of a YAML file")
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
