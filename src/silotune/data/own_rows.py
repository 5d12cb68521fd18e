"""Judge silos of a partitioned data set on rows of their own kind (`partition.evaluation=own`).

A silo of skewed labels is to be judged on labels as it has them. Its share of the training rows of a label, which the
partition drew, is the weight of every held-out row with that label, so that nothing else is drawn and no row is lost.
Other rows are dealt: by the value of the partition's column, or by quotas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from silotune.core.randomness import derive
from silotune.data.partition import Indices
from silotune.data.rows import Row, SiloData, Splits
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.config.data import PartitionConfig

HELD_OUT = ("validation", "test")

LEAST = 20
"""Effective number of rows below which a silo's score on its own rows says nothing, and is left out."""


def effective_number(weights: NDArray[np.float64], counts: NDArray[Any]) -> float:
    """Return (Σw)²/Σw², the number of equally weighted rows whose mean has the same variance (Kish 1965).

    `counts` says how many rows have each of the weights.
    """
    squares = float((counts * weights**2).sum())
    return float((counts * weights).sum()) ** 2 / squares if squares else 0.0


def label_shares(labels: Sequence[int], groups: Sequence[Indices], classes: int) -> NDArray[np.float64]:
    """Return each silo's share of the training rows of every label, shape (silos, classes); 0 of a label without any.

    Args:
        labels: of all training rows; negative ones are none.
        groups: the training rows of each silo.
        classes: the number of labels.
    """
    of_row = np.asarray(labels, dtype=np.int64)
    counts = np.stack([np.bincount(of_row[rows][of_row[rows] >= 0], minlength=classes) for rows in groups])
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(0), 1)
    return shares


def quotas(sizes: Sequence[int], rows: int, seed: int, purpose: str) -> Indices:
    """Deal rows to silos in proportion to their sizes; returns the silo of each row.

    Quotas are rounded by largest remainder, ties in the silos' order; one draw from the seed deals.
    """
    exact = rows * np.asarray(sizes, dtype=float) / sum(sizes)
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: rows - whole.sum()]] += 1
    dealt: Indices = np.random.default_rng(derive(seed, "own rows", purpose)).permutation(
        np.repeat(np.arange(len(sizes)), whole)
    )
    return dealt


def with_own_rows(
    silos: Sequence[SiloData], groups: Sequence[Indices], rows: Splits, rule: PartitionConfig, seed: int
) -> list[SiloData]:
    """Give silos the weights of labels or, where they are to be judged on their own rows, rows of their own.

    Args:
        silos: the silos, which share the held-out rows.
        groups: the training rows of each.
        rows: all rows.
        rule: the partition.
        seed: that of the partition.
    """
    own = rule.evaluation == "own"
    if silos[0].task.rules.one_label and rule.name != "column":
        shares = label_shares([row.label for row in rows.train], groups, len(silos[0].task.labels))
        result = [
            replace(silo, weights=_weights(of_silo, rows), judged_by_own=own)
            for silo, of_silo in zip(silos, shares, strict=True)
        ]
        judged = [any(silo.weights["test"]) for silo in result]
    elif own:
        result = _dealt(silos, rows, rule, seed)
        judged = [bool(silo.splits.test) for silo in result]
    else:
        return list(silos)
    if own and not any(judged):
        raise InputError(
            f"partition.evaluation=own: no silo has {LEAST} test rows of its own kind; allowed: shared, or fewer silos"
        )
    return result


def _weights(shares: NDArray[np.float64], rows: Splits) -> dict[str, list[float]]:
    """Return the weight of each label by split, all 0 where the rows are too few."""
    weights = {}
    for split in HELD_OUT:
        labels = [row.label for row in getattr(rows, split) if row.label >= 0]
        counts = np.bincount(labels, minlength=len(shares)) if labels else np.zeros(len(shares))
        weights[split] = (shares if effective_number(shares, counts) >= LEAST else 0 * shares).tolist()
    return weights


def _dealt(silos: Sequence[SiloData], rows: Splits, rule: PartitionConfig, seed: int) -> list[SiloData]:
    """Leave each silo the held-out rows that are its own; none where they are too few, all where nobody knows whose."""
    sizes, own = [len(silo.splits.train) for silo in silos], [silo.splits for silo in silos]
    values = {silo.splits.train[0].group: number for number, silo in enumerate(silos)}
    for split in HELD_OUT:
        held_out: list[Row] = getattr(rows, split)
        if rule.name == "column":
            if not has_column(held_out):
                continue
            owners = [values.get(row.group, -1) for row in held_out]
        else:
            owners = quotas(sizes, len(held_out), seed, split).tolist()
        of_silo: list[list[Row]] = [[] for _ in silos]
        for row, owner in zip(held_out, owners, strict=True):
            if owner >= 0:
                of_silo[owner].append(row)
        own = [
            replace(splits, **{split: mine if len(mine) >= LEAST else []})
            for splits, mine in zip(own, of_silo, strict=True)
        ]
    return [replace(silo, splits=splits) for silo, splits in zip(silos, own, strict=True)]


def has_column(rows: Sequence[Row]) -> bool:
    """Return whether held-out rows have a value in the partition's column."""
    return any(row.group for row in rows)


def own_warnings(silos: Sequence[SiloData], rule: PartitionConfig) -> Iterator[str]:
    """Yield what a run with `partition.evaluation=own` is to say: which silos are left out, or that none can be."""
    if rule.name == "none" or rule.evaluation == "shared":
        return
    for split in HELD_OUT:
        all_rows: list[list[Row]] = [getattr(silo.splits, split) for silo in silos]
        if rule.name == "column" and all_rows[0] and not any(map(has_column, all_rows)):
            yield f"partition.evaluation=own: {split} rows have no {rule.column}, so that all silos share them"
        few = [
            silo.name
            for silo, rows in zip(silos, all_rows, strict=True)
            if not (any(silo.weights[split]) if silo.weights else rows)
        ]
        if few:
            yield f"partition.evaluation=own: fewer than {LEAST} {split} rows of their own, left out: {', '.join(few)}"
