"""Combine the counts of all silos' rows, and warn of what they show before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silotune.data.row_checks import unlike_labels
from silotune.distributed.protocol.disclosure import HIDDEN, LEAST_COUNT, Surveyed
from silotune.training.federation import Federation

FEW_UNITS = 100
"""A silo with fewer units makes a warning."""


def combined(answers: Mapping[str, Surveyed], federation: Federation) -> dict[str, Any]:
    """Return the counts of `silos`, `all` of them together, figures that silos do not tell, and warnings.

    Labels count together with those of the same task alone.
    """
    tasks, choice = federation.tasks, federation.config.survey.figures
    parts: dict[str, dict[str, list[Any]]] = {}
    labels: dict[str, dict[str, set[str]]] = {}
    few, silos = [], dict[str, dict[str, Any]]()
    for silo, figures in sorted(answers.items()):
        for figure, bins in figures.items():
            title = f"labels of {tasks[silo].name}" if figure == "labels" else figure
            silos.setdefault(silo, {})[title] = dict(bins)
            for name, count in bins:
                parts.setdefault(title, {}).setdefault(name, []).append(count)
                if figure == "labels" and count != HIDDEN:
                    labels.setdefault(tasks[silo].name, {}).setdefault(silo, set()).add(name)
                if figure == "units" and (count == HIDDEN or int(count) < FEW_UNITS):
                    few.append(f"silo {silo!r}: {count} units; its scores and its updates say little")
    return {
        "silos": silos,
        "all": {title: {name: _sum(counts) for name, counts in bins.items()} for title, bins in parts.items()},
        "untold": {silo: rest for silo in tasks if (rest := [f for f in choice if f not in answers.get(silo, {})])},
        "warnings": [*few, *unlike_labels(labels)],
    }


def _sum(counts: list[Any]) -> int | str:
    """Add counts up; where some are hidden, to the least and the most that the sum can be."""
    least = sum(count for count in counts if isinstance(count, int))
    hidden = sum(count == HIDDEN for count in counts)
    return f"{least} to {least + hidden * (LEAST_COUNT - 1)}" if hidden else least
