"""`change_silos` changes single entries of `silos` by name: `silos.sms.metric=f1` on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from silotune.config.paths import is_elsewhere, resolve
from silotune.config.trees import Tree, flat
from silotune.errors import InputError, unknown_name_error

Changes = list[tuple[str, Any]]
"""Silo's name and key with a dot between, and the value."""


def take_changes(tree: Tree) -> Changes:
    """Remove the changes of entries of `silos` from a tree of words, and return them; a whole list stays."""
    return list(flat(tree.pop("silos"))) if isinstance(tree.get("silos"), dict) else []


def change_silos(tree: Tree, changes: Changes) -> None:
    """Apply changes to a tree's list of silos."""
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
        if key == "path" and not is_elsewhere(value):
            resolve(by_name[name], key, Path())
    tree["silos"] = [by_name[str(silo.get("name"))] if isinstance(silo, dict) else silo for silo in silos or []]
