"""`differences`: the keys in which two configurations differ, for which `--resume` and `compare` refuse a run folder.

A key whose default differed in an earlier version is here, too, so that its run folders still compare equal.
"""

from __future__ import annotations

from typing import Any

from silotune.config.parse import validated
from silotune.config.trees import flat, parse_tree


def differences(before: str, after: str) -> list[str]:
    """Return the keys in which two configurations differ, as `section.key: old → new`.

    Keys that one text lacks have their defaults, so that a configuration written by an earlier version compares equal.
    Exceptions: earlier versions always validated by the metric (`evaluation.validation`), and had no `method.guard`.
    The description does not count.

    Args:
        before: a configuration as `dump` writes it.
        after: another one.
    """
    if before == after:
        return []
    old, new = (
        dict(flat(_by_name(validated(_with_earlier_defaults(parse_tree(text, "of the run"))).model_dump(mode="json"))))
        for text in (before, after)
    )
    names = dict.fromkeys([*old, *new])
    return [f"{name}: {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def _by_name(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with its silos by name, so that a difference names one silo's key; their order counts, too."""
    silos = {silo["name"]: silo for silo in tree["silos"]}
    words = {key: value for key, value in tree.items() if key != "description"}  # a preset's own text decides nothing
    return words | {"silos": {"(order)": ", ".join(silos)} | silos}


def _with_earlier_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with the keys whose defaults differed in earlier versions."""
    earlier: dict[str, dict[str, Any]] = {"evaluation": {"validation": "metric"}}
    method = tree.get("method")
    if isinstance(method, dict) and method.get("name") == "fedfame":
        earlier["method"] = {"guard": False}
    given = {section: tree.get(section) or {} for section in earlier}
    return tree | {key: earlier[key] | keys for key, keys in given.items() if isinstance(keys, dict)}
