"""Read test scores out of a run's summary: of silos, of averages and of baselines, and rank them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silotune.core.numeric import mean_ignoring_none, score_text
from silotune.data.kinds import KINDS
from silotune.data.tasks import metric_title
from silotune.evaluation.baselines import BAG_OF_WORDS, MAJORITY
from silotune.evaluation.untouched import SHOWN, UNTOUCHED
from silotune.runs.summary import averages

ALL_METRICS = {metric for kind in KINDS.values() for metric in kind.metrics}

AVERAGE = "average"
"""The column of the mean over silos. Where silos of a run have unlike metrics there is one for each: `average f1`."""

UNTOUCHED_TITLE = "untouched backbone"

BESIDE = {"own rows": "average_own", "shared rows": "average_shared"}
"""Columns of the mean over silos that are judged on their own kinds of rows or all alike → their key in a summary."""

ALWAYS_NAMED = {MAJORITY: "most frequent label", BAG_OF_WORDS: "bag of words"}
"""Baselines that the table of silos names even where no silo has one."""


def baseline_titles() -> dict[str, str]:
    """Return every baseline's title in tables, those of registered kinds of tasks included, in the tables' order."""
    own = {key: title for kind in KINDS.values() for key, title in kind.baselines.items()}
    return {**ALWAYS_NAMED, **own, UNTOUCHED: UNTOUCHED_TITLE, SHOWN: "untouched, after rows"}


def score_of(summary: Mapping[str, Any], column: str) -> float | None:
    """Return a run's test score for a silo or for a column of averages."""
    if column == AVERAGE:
        value = summary["average"]
    elif column in BESIDE:
        value = summary.get(BESIDE[column])
    elif metric := metric_of_column(column):
        value = averages(summary["silos"]).get(metric)
    else:
        value = summary["silos"].get(column, {}).get("test")
    return None if value is None else float(value)


def metric_of_column(column: str) -> str:
    """Return the metric of a column of averages per metric; empty for all other columns."""
    first, _, metric = column.partition(" ")
    return metric if first == AVERAGE and metric in ALL_METRICS else ""


def metrics_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the different metrics of a run's silos."""
    return list(dict.fromkeys(str(silo.get("metric", "")) for silo in summary["silos"].values()))


def silo_metric(summary: Mapping[str, Any], silo: str) -> str:
    """Return a silo's metric for display; F1 with the label that counts as positive."""
    task = (summary.get("tasks") or {}).get(silo, {})
    return metric_title(str(summary["silos"][silo].get("metric", "score")), str(task.get("positive", "")))


def average_text(summary: Mapping[str, Any]) -> str:
    """Return a run's mean test score for display; where silos have unlike metrics, the mean of each metric."""
    if len(metrics_of(summary)) <= 1:
        return score_text(summary["average"])
    means = averages(summary["silos"])
    return ", ".join(f"{metric_title(metric)} {score_text(mean)}" for metric, mean in means.items())


def backbones_text(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Name the backbones of runs: ids of the hub as they are, local folders by their last name."""
    names = dict.fromkeys(str(summary["backbone"]) for summary in summaries)
    short_names = dict.fromkeys(Path(name).name if Path(name).is_absolute() else name for name in names)
    return f"backbone{'s' if len(short_names) > 1 else ''} {', '.join(short_names)}"


def baseline_of(summary: Mapping[str, Any], column: str, baseline: str) -> float | None:
    """Return a baseline's score of a run, for a silo or a column of averages."""
    baselines = summary.get("baselines") or {}
    by_silo, silos = baselines.get("silos", {}), summary["silos"]
    if column in by_silo:
        return _number(by_silo[column].get(baseline))
    metric = metric_of_column(column)
    if column != AVERAGE and not metric:
        return None
    if baselines.get("global"):
        return _number(baselines["global"].get(baseline))
    if not metric and summary["average"] is None:
        return None
    return mean_ignoring_none(
        _number(scores.get(baseline))
        for silo, scores in by_silo.items()
        if silo in silos and metric in ("", silos[silo].get("metric"))
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def ranks(scores: Sequence[float | None], groups: Sequence[Hashable] | None = None, lower: bool = False) -> list[int]:
    """Rank scores: 1 for the best of a group, 2 for the second, 0 for all others; ties up to 6 decimals share a rank.

    Missing scores (None), and those alone in their group, have rank 0. Without groups, all form one.
    """
    group_of = [None] * len(scores) if groups is None else list(groups)
    sizes = Counter(group_of)
    sign = -1 if lower else 1
    rounded = [None if score is None else sign * round(score, 6) for score in scores]
    result = []
    for score, group in zip(rounded, group_of, strict=True):
        others = {other for other, its_group in zip(rounded, group_of, strict=True) if its_group == group}
        better = sum(other > score for other in others if other is not None) if score is not None else 2
        result.append(better + 1 if better < 2 and sizes[group] > 1 else 0)
    return result
