"""Divide one data set among silos: evenly, by size, by label skew, in shards, or by a column's values.

The partitioners of `flwr-datasets` redraw until every silo has its minimum number of rows, and may give up. These never
redraw: an impossible request is refused at once, and silos that get too few rows receive rows of the largest ones.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from silotune.core.randomness import derive
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.config.data import PartitionConfig

Indices = NDArray[np.int64]
"""Row indices of one silo, ascending."""

_LONGEST_NAME = 80


def partition_rows(labels: Sequence[int], rule: PartitionConfig, seed: int) -> list[Indices]:
    """Divide rows among silos.

    The rule is any but `column`; its own seed is ignored.

    Returns:
        Row indices per silo; each row is in exactly one silo.
    """
    classes = np.asarray(labels, dtype=np.int64)
    needed = rule.silos * rule.min_rows
    if len(classes) < needed:
        raise InputError(
            f"partition.min_rows: {rule.silos} silos of at least {rule.min_rows} rows need {needed} rows, but there "
            f"are {len(classes)}; lower partition.silos or partition.min_rows"
        )
    draws = np.random.default_rng(derive(seed, "partition", rule.name))
    if rule.name == "iid":
        groups = iid(len(classes), rule.silos, draws)
    elif rule.name == "quantity":
        groups = quantity(len(classes), rule.silos, rule.alpha, draws)
    elif rule.name == "shards":
        groups = shards(classes, rule.silos, rule.shards, draws)
    elif rule.balanced:
        groups = dirichlet_balanced(classes, rule.silos, rule.alpha, draws)
    else:
        groups = dirichlet(classes, rule.silos, rule.alpha, draws)
    return [np.sort(group) for group in ensure_minimum(groups, rule.min_rows, draws)]


def iid(rows: int, silos: int, draws: np.random.Generator) -> list[Indices]:
    """Split a random permutation into equal pieces; sizes differ by at most one row."""
    return np.array_split(draws.permutation(rows), silos)


def quantity(rows: int, silos: int, alpha: float, draws: np.random.Generator) -> list[Indices]:
    """Split a random permutation by shares ~ Dir(alpha·1)."""
    return _cut(draws.permutation(rows), _shares(silos, alpha, draws))


def shards(labels: Indices, silos: int, each: int, draws: np.random.Generator) -> list[Indices]:
    """Sort rows by label, cut them into `silos·each` shards of equal size, and deal `each` shards to every silo.

    McMahan et al. 2017, section 3.
    """
    shuffled = draws.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], silos * each)
    deals = draws.permutation(silos * each).reshape(silos, each)
    return [np.concatenate([pieces[piece] for piece in silo_pieces]) for silo_pieces in deals]


def dirichlet(labels: Indices, silos: int, alpha: float, draws: np.random.Generator) -> list[Indices]:
    """Skew labels: divide every label's rows among silos by shares ~ Dir(alpha·1). Sizes differ, too.

    Hsu et al. 2019 as simplified by Yurochkin et al. 2019, the variant of most later benchmarks.
    """
    pieces = [
        _cut(draws.permutation(np.flatnonzero(labels == label)), _shares(silos, alpha, draws))
        for label in np.unique(labels)
    ]
    return [np.concatenate([_EMPTY, *(of_label[silo] for of_label in pieces)]) for silo in range(silos)]


def dirichlet_balanced(labels: Indices, silos: int, alpha: float, draws: np.random.Generator) -> list[Indices]:
    """Skew labels at equal sizes: every silo draws rows without replacement by label shares ~ Dir(alpha·1).

    Hsu et al. 2019, as implemented by Flower's earlier data sets. A label that is used up leaves the later draws, so
    the last silos take the remaining rows.
    """
    pools = [list(draws.permutation(np.flatnonzero(labels == label))) for label in np.unique(labels)]
    sizes = [len(piece) for piece in np.array_split(labels, silos)]
    groups = []
    for size in sizes:
        shares = _shares(len(pools), alpha, draws) if pools else np.zeros(0)
        group: list[int] = []
        while len(group) < size:  # every iteration but the last exhausts a label
            remaining = np.array([len(rows) for rows in pools], dtype=np.float64)
            weights = np.where(remaining > 0, shares, 0.0)
            weights = weights if weights.sum() > 0 else remaining  # all labels with a share are exhausted
            numbers = draws.multinomial(size - len(group), weights / weights.sum())
            for rows, number in zip(pools, numbers.tolist(), strict=True):
                group += [rows.pop() for _ in range(min(number, len(rows)))]
        groups.append(np.array(group, dtype=np.int64))
    return groups


def ensure_minimum(groups: Sequence[Indices], least: int, draws: np.random.Generator) -> list[Indices]:
    """Give silos with fewer than `least` rows random rows, one at a time from the currently largest silo.

    The total must suffice for all silos.
    """
    rows = [group.tolist() for group in groups]
    small = [silo for silo, silo_rows in enumerate(rows) if len(silo_rows) < least]
    if not small:
        return list(groups)
    largest = [(-len(silo_rows), silo) for silo, silo_rows in enumerate(rows)]
    heapq.heapify(largest)
    for silo_rows in rows:
        draws.shuffle(silo_rows)
    for silo in small:
        while len(rows[silo]) < least:
            _, donor = heapq.heappop(largest)  # has more than `least` rows, unless all silos have enough
            rows[silo].append(rows[donor].pop())
            heapq.heappush(largest, (-len(rows[donor]), donor))
    return [np.array(silo_rows, dtype=np.int64) for silo_rows in rows]


def partition_by_value(values: Sequence[str], least: int) -> dict[str, Indices]:
    """Make natural silos: one per value of a column, in sorted order, named after it."""
    empty = sum(not value for value in values)
    if empty:
        raise InputError(f"partition.column: missing or empty in {empty} of {len(values)} rows")
    rows: dict[str, list[int]] = {value: [] for value in sorted(set(values))}
    for row, value in enumerate(values):
        rows[value].append(row)
    groups = {value: np.array(indices, dtype=np.int64) for value, indices in rows.items()}
    if len(groups) < 2:
        raise InputError(f"partition.column: only one value ({next(iter(groups), '')!r}); at least 2 are needed")
    for value, group in groups.items():
        if len(group) < least:
            raise InputError(
                f"partition.min_rows: {value!r} has only {len(group)} rows; at least {least} are asked for"
            )
    return dict(zip(_names(list(groups)), groups.values(), strict=True))


def silo_names(silos: int) -> list[str]:
    """Return `silo-01`, `silo-02`, …, zero-padded so that name order is number order."""
    return [f"silo-{number:0{len(str(silos))}d}" for number in range(1, silos + 1)]


def _names(values: Sequence[str]) -> list[str]:
    """Turn values into valid silo names: replace characters that paths may not contain, number duplicates.

    Names that differ in case only are duplicates, as in some file systems.
    """
    names: dict[str, str] = {}
    for value in values:
        plain = re.sub(r"[^A-Za-z0-9 ._-]", "_", value).lstrip(" ._-")[:_LONGEST_NAME].rstrip(" .") or "silo"
        name, number = plain, 1
        while name.lower() in names:
            number += 1
            name = f"{plain}-{number}"
        names[name.lower()] = name
    return list(names.values())


_EMPTY: Indices = np.zeros(0, dtype=np.int64)


def _shares(number: int, alpha: float, draws: np.random.Generator) -> NDArray[np.float64]:
    """Draw shares ~ Dir(alpha·1); if they underflow, the limit for small alpha: all to one."""
    shares: NDArray[np.float64] = draws.dirichlet(np.full(number, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares
    shares = np.zeros(number)
    shares[draws.integers(number)] = 1
    return shares


def _cut(rows: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """Split rows by shares; rounding loses none."""
    ends = np.rint(np.cumsum(shares) * len(rows)).astype(np.int64)
    ends[-1] = len(rows)
    return np.split(rows, ends[:-1])
