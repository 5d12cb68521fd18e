"""`differences` lists the keys in which two configurations differ, by which `--resume` and `compare` refuse one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from silotune.config.parse import validated
from silotune.config.trees import parse_tree


def differences(before: str, after: str) -> list[str]:
    """Return the keys in which two configurations differ, as `section.key: old → key: new`.

    Keys that one text lacks have their defaults, so that a configuration written by an earlier version compares equal.
    `evaluation.validation` is the exception: earlier versions always validated by the metric.

    Args:
        before: a configuration as `dump` writes it.
        after: another one.

    Raises:
        InputError: a text is not a valid configuration.
    """
    if before == after:
        return []
    old, new = (
        dict(_leaves(validated(_with_earlier_defaults(parse_tree(text, "of the run"))).model_dump(mode="json")))
        for text in (before, after)
    )
    names = dict.fromkeys([*old, *new])
    return [
        f"{name}: {old.get(name)} → {name.rpartition('.')[2]}: {new.get(name)}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _with_earlier_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with the keys whose defaults differed in earlier versions."""
    evaluation = tree.get("evaluation") or {}
    return tree | {"evaluation": {"validation": "metric"} | evaluation} if isinstance(evaluation, dict) else tree


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values that are no sections, with the keys that lead to them."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
