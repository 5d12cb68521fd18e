"""Pair the test rows of two entries of a comparison, row by row, and find how their difference varies with the rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from silotune.core.randomness import derive
from silotune.data.scores import Counts
from silotune.data.tasks import LOSS_METRICS, Task, lower_is_better, read_task
from silotune.errors import InputError
from silotune.lab.report.entries import FinishedRun, ReportEntry
from silotune.lab.report.verdicts import Differences

RESAMPLES = 1000

_MOST_NUMBERS = 4_000_000
"""Numbers of one piece of resamples, which bounds the memory."""

_ONE = ""
"""Stands for the silo in `FinishedRun.predictions` where one model has one set of test rows."""

Score = Callable[[Counts], Counts]
"""Scores resamples: how often each row counts, shape (resamples, rows) → shape (resamples,), in the metric's units."""


@dataclass(frozen=True)
class SiloRows:
    """A silo's test rows in one run.

    Args:
        identity: digest of their labels or answers and prompts, in order.
        weights: digest of how much each counts; empty: all alike.
        rows: their number.
        units: the number of each row's unit; a unit's rows are drawn together.
        score: scores resamples of them.
    """

    identity: str
    weights: str
    rows: int
    units: Counts
    score: Score


def _rows_of(run: FinishedRun, metric: str, by: str) -> dict[str, SiloRows]:
    """Return silo → its test rows, of the silos with this metric if one is given; judged by another one if it is."""
    tasks, results = run.summary.get("tasks") or {}, run.summary["silos"]
    judged = {}
    for silo, columns in run.predictions.items():
        name = silo or next(iter(tasks))
        task = read_task({key: value for key, value in tasks[name].items() if key != "texts"})
        own = str((results.get(name) or {}).get("metric", task.metric))
        if metric in ("", own):
            words, weights = _digest(columns["label"], columns["prompt"]), columns.get("weight")
            score, rows = _score(task, by or own, columns), len(columns["label"])
            units = np.unique(columns["unit"], return_inverse=True)[1] if "unit" in columns else np.arange(rows)
            if weights is not None:
                score = _weighted(score, np.array(weights))
            judged[silo] = SiloRows(words, "" if weights is None else _digest(weights), rows, units, score)
    return judged


def _digest(*columns: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest()


def _weighted(score: Score, weights: Counts) -> Score:
    """Return a score in which a row that is drawn once counts as much as its weight."""
    return lambda drawn: score(drawn * weights)


def _score(task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Score:
    """Return what scores resamples of rows by a metric; a larger score is better, whatever the metric."""
    if metric in LOSS_METRICS or metric not in task.rules.metrics:
        raise InputError(f"no {metric} of single rows is kept")
    score, sign = task.rules.resampled(task, metric, columns), -1 if lower_is_better(metric) else 1
    return lambda drawn: sign * score(drawn)


def paired_differences(entry: ReportEntry, reference: ReportEntry, metric: str = "", by: str = "") -> Differences:
    """Return the differences of two entries over the seeds that both have, and their variance over shared rows.

    A row is drawn in all seeds, silos and both entries together. The part of the rows' variance that differs by seed is
    taken out: the variance of seeds has it already.

    Args:
        entry: one side; it needs a seed in common with the other.
        reference: the other side.
        metric: only silos with this metric; empty: all.
        by: judge by this metric; empty: by each silo's own.

    Raises:
        InputError: the rows of a run were not kept, or two runs of a seed were tested on different rows.
    """
    pairs = _pairs(entry, reference, metric, by)
    rows = {silo: {run[silo].identity for pair in pairs for run in pair} for silo in pairs[0][0]}
    units = {each.identity: each.units for pair in pairs for each in pair[0].values()}
    once = {identity: np.ones((1, len(of_rows))) for identity, of_rows in units.items()}
    by_seed = tuple(float(_difference(pair, once)[0]) for pair in pairs)
    if any(len(identities) > 1 for identities in rows.values()):
        return Differences(by_seed)
    resampled = np.concatenate([np.stack([_difference(pair, drawn) for pair in pairs]) for drawn in _draws(units)], 1)
    resampled = resampled[:, ~np.isnan(resampled).any(0)]  # an AUROC has no value without rows of a class
    mean = resampled.mean(0)
    variance = float(mean.var())
    if len(pairs) > 1:
        variance -= float((resampled - mean).var(1).sum()) / (len(pairs) * (len(pairs) - 1))
    return Differences(by_seed, max(variance, 0.0), sum(counts.shape[1] for counts in once.values()))


Pair = tuple[dict[str, SiloRows], dict[str, SiloRows]]


def _pairs(entry: ReportEntry, reference: ReportEntry, metric: str, by: str) -> list[Pair]:
    others = {run.seed: run for run in reference.runs}
    pairs = []
    for run in entry.runs:
        if run.seed in others:
            one, other = (_rows_of(each, metric, by) for each in (run, others[run.seed]))
            if _ONE in one or _ONE in other:
                one, other = _spread(one, other), _spread(other, one)
            tested = [{silo: (rows.identity, rows.weights) for silo, rows in side.items()} for side in (one, other)]
            if tested[0] != tested[1]:
                raise InputError(f"seed {run.seed}: the two were tested on different rows")
            pairs.append((one, other))
    if not pairs or not pairs[0][0]:
        raise InputError("no seed in common")
    return pairs


def _spread(rows: dict[str, SiloRows], other: Mapping[str, SiloRows]) -> dict[str, SiloRows]:
    """Return the rows of one model for each silo of the other entry, which has a model for each."""
    return dict.fromkeys(other, rows[_ONE]) if _ONE in rows and _ONE not in other else rows


def _difference(pair: Pair, drawn: Mapping[str, Counts]) -> Counts:
    one, other = pair
    each = [
        one[silo].score(drawn[rows.identity]) - other[silo].score(drawn[rows.identity]) for silo, rows in one.items()
    ]
    mean: Counts = np.mean(each, axis=0)
    return mean


def _draws(units: Mapping[str, Counts]) -> list[dict[str, Counts]]:
    """Return pieces of resamples: for each set of rows how often each row counts; equal rows are drawn once.

    `units` has the number of each row's unit: as many units are drawn as there are.
    """
    generators = {identity: np.random.default_rng(derive(0, "verdict", identity)) for identity in units}
    piece = max(1, min(RESAMPLES, _MOST_NUMBERS // max(map(len, units.values()))))
    sizes = [min(piece, RESAMPLES - start) for start in range(0, RESAMPLES, piece)]
    numbers = {identity: int(of_rows.max()) + 1 for identity, of_rows in units.items()}
    return [
        {
            identity: generators[identity].multinomial(number, np.full(number, 1 / number), size)[:, units[identity]]
            for identity, number in numbers.items()
        }
        for size in sizes
    ]
