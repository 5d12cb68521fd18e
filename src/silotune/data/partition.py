"""Partitioners: one labeled data set divided among silos, seeded, every row in exactly one silo.

None of them tries again until something fits, so none can hang: what cannot be done is refused at once, and silos that
a skewed draw leaves with too few rows get rows of the largest ones. Plain NumPy: the partitioners of `flwr-datasets`
draw again until every silo has its minimum, and give up after some tries.
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
    from silotune.config.partition import PartitionConfig


Indices = NDArray[np.int64]
"""Row numbers of one silo, in increasing order."""

_LONGEST_NAME = 80


def partition_rows(labels: Sequence[int], rule: PartitionConfig, seed: int) -> list[Indices]:
    """The rows of every silo, as row numbers; each row is in exactly one silo.

    Args:
        labels: the rows' classes.
        rule: which partitioner (any but `column`), and its options.
        seed: of all draws; `rule.seed` is not read.

    Raises:
        InputError: if there are too few rows for every silo to have `rule.min_rows`.
    """
    classes = np.asarray(labels, dtype=np.int64)
    need = rule.silos * rule.min_rows
    if len(classes) < need:
        raise InputError(
            f"partition.min_rows: {rule.silos} silos of at least {rule.min_rows} rows need {need} rows, but there are "
            f"{len(classes)}; lower partition.silos or partition.min_rows"
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
    """A random permutation in equal pieces; sizes differ by at most one row."""
    return np.array_split(draws.permutation(rows), silos)


def quantity(rows: int, silos: int, alpha: float, draws: np.random.Generator) -> list[Indices]:
    """Unequal sizes: a random permutation cut by shares ~ Dir(alpha·1)."""
    return _cut(draws.permutation(rows), _shares(silos, alpha, draws))


def shards(labels: Indices, silos: int, each: int, draws: np.random.Generator) -> list[Indices]:
    """Rows sorted by label, cut into `silos·each` shards of equal size, `each` dealt to every silo.

    McMahan et al. 2017, section 3.
    """
    shuffled = draws.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], silos * each)
    dealt = draws.permutation(silos * each).reshape(silos, each)
    return [np.concatenate([pieces[piece] for piece in own]) for own in dealt]


def dirichlet(labels: Indices, silos: int, alpha: float, draws: np.random.Generator) -> list[Indices]:
    """Label skew: every label's rows are cut by shares of their own over silos, ~ Dir(alpha·1). Sizes differ too.

    Hsu et al. 2019 as simplified by Yurochkin et al. 2019 and used in most benchmarks since.
    """
    pieces = [
        _cut(draws.permutation(np.flatnonzero(labels == label)), _shares(silos, alpha, draws))
        for label in np.unique(labels)
    ]
    return [np.concatenate([_EMPTY, *(of_label[silo] for of_label in pieces)]) for silo in range(silos)]


def dirichlet_balanced(labels: Indices, silos: int, alpha: float, draws: np.random.Generator) -> list[Indices]:
    """Label skew at equal sizes: every silo has label shares ~ Dir(alpha·1) and draws its rows without replacement.

    Hsu et al. 2019, as Flower's own data sets had it. A label that is used up is left out of the shares from there on,
    so the last silos also take what the others left.
    """
    left = [list(draws.permutation(np.flatnonzero(labels == label))) for label in np.unique(labels)]
    sizes = [len(piece) for piece in np.array_split(labels, silos)]
    groups = []
    for size in sizes:
        shares = _shares(len(left), alpha, draws) if left else np.zeros(0)
        chosen: list[int] = []
        while len(chosen) < size:  # every turn but the last uses a label up
            there = np.array([len(rows) for rows in left], dtype=np.float64)
            now = np.where(there > 0, shares, 0.0)
            now = now if now.sum() > 0 else there  # the labels it wanted are used up
            wanted = draws.multinomial(size - len(chosen), now / now.sum())
            for rows, number in zip(left, wanted.tolist(), strict=True):
                chosen += [rows.pop() for _ in range(min(number, len(rows)))]
        groups.append(np.array(chosen, dtype=np.int64))
    return groups


def ensure_minimum(groups: Sequence[Indices], least: int, draws: np.random.Generator) -> list[Indices]:
    """Silos with fewer than `least` rows get random rows, one at a time from the silo that is largest then.

    There must be `least` rows per silo in all.
    """
    rows = [group.tolist() for group in groups]
    poor = [silo for silo, own in enumerate(rows) if len(own) < least]
    if not poor:
        return list(groups)
    largest = [(-len(own), silo) for silo, own in enumerate(rows)]
    heapq.heapify(largest)
    for own in rows:
        draws.shuffle(own)
    for silo in poor:
        while len(rows[silo]) < least:
            _, giver = heapq.heappop(largest)  # never a poor one: the largest has more than `least`, or all have enough
            rows[silo].append(rows[giver].pop())
            heapq.heappush(largest, (-len(rows[giver]), giver))
    return [np.array(own, dtype=np.int64) for own in rows]


def partition_by_value(values: Sequence[str], least: int) -> dict[str, Indices]:
    """Natural silos: one per value of a column, in the values' order, named after it.

    Raises:
        InputError: for rows without a value, one value only, or one with fewer than `least` rows.
    """
    empty = sum(not value for value in values)
    if empty:
        raise InputError(f"partition.column: missing or empty in {empty} of {len(values)} rows")
    rows: dict[str, list[int]] = {value: [] for value in sorted(set(values))}
    for row, value in enumerate(values):
        rows[value].append(row)
    groups = {value: np.array(own, dtype=np.int64) for value, own in rows.items()}
    if len(groups) < 2:
        raise InputError(f"partition.column: only one value ({next(iter(groups), '')!r}); at least 2 are needed")
    for value, group in groups.items():
        if len(group) < least:
            raise InputError(
                f"partition.min_rows: {value!r} has only {len(group)} rows; at least {least} are asked for"
            )
    return dict(zip(_names(list(groups)), groups.values(), strict=True))


def silo_names(silos: int) -> list[str]:
    """`silo-01`, `silo-02`, …: in name order as in number order."""
    return [f"silo-{number:0{len(str(silos))}d}" for number in range(1, silos + 1)]


def _names(values: Sequence[str]) -> list[str]:
    """Values as silo names, which become files, folders and nodes: other characters are replaced, equal names numbered.

    Names that differ in case only are equal: to some file systems they are.
    """
    found: dict[str, str] = {}
    for value in values:
        plain = re.sub(r"[^A-Za-z0-9 ._-]", "_", value).lstrip(" ._-")[:_LONGEST_NAME].rstrip(" .") or "silo"
        name, number = plain, 1
        while name.lower() in found:
            number += 1
            name = f"{plain}-{number}"
        found[name.lower()] = name
    return list(found.values())


_EMPTY: Indices = np.zeros(0, dtype=np.int64)


def _shares(number: int, alpha: float, draws: np.random.Generator) -> NDArray[np.float64]:
    """Shares ~ Dir(alpha·1); where floating point has nothing left of them, the limit for small alpha: all to one."""
    shares: NDArray[np.float64] = draws.dirichlet(np.full(number, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares
    shares = np.zeros(number)
    shares[draws.integers(number)] = 1
    return shares


def _cut(rows: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """Rows in pieces by shares; none is lost to rounding."""
    ends = np.rint(np.cumsum(shares) * len(rows)).astype(np.int64)
    ends[-1] = len(rows)
    return np.split(rows, ends[:-1])
