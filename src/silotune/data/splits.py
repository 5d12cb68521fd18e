"""Divide one silo's rows into training, validation and test rows: shuffled, cut and capped.

Rows of one unit (`privacy.unit`) stay together, and all counts are of units. Without units every row is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from silotune.core.randomness import sampler
from silotune.data.rows import Row, Splits
from silotune.errors import InputError

Units = list[list[Row]]
"""The rows of each unit."""


@dataclass(frozen=True)
class SplitRule:
    """How rows become splits.

    Args:
        merge: join train and validation, cap them at `rows_per_silo` and split by `ratio` (FedMCP, section V-A).
            Otherwise the published splits are kept. A missing validation split is then cut from the training rows
            beyond `train_rows` (a tenth of all if there are none; nothing if `validation_rows` is 0), and without a
            test split the validation split serves as test split.
        halve: if only one of validation and test exists, halve it into both instead.
        ratio: shares of train, validation and test for `merge`.
        rows_per_silo: cap before the split with `merge`, else a cap of train alone.
        train_rows: cap of the training split.
        validation_rows: cap of the validation split.
        test_rows: cap of the test split.
    """

    merge: bool = False
    halve: bool = False
    ratio: tuple[float, float, float] = (0.6, 0.2, 0.2)
    rows_per_silo: int | None = None
    train_rows: int | None = None
    validation_rows: int | None = None
    test_rows: int | None = None


def split(published: Splits, rule: SplitRule, seed: int, silo: str) -> Splits:
    """Make a silo's splits; its name and the seed are part of the purpose of the shuffles."""
    if rule.merge and published.test:
        raise InputError(f"silo {silo!r}: data.merge=true would throw its test split away; set data.merge=false")
    make = _split_merged if rule.merge else _complete
    train, validation, test = make(published, rule, seed, silo)
    return Splits(
        _rows(train[: rule.train_rows]), _rows(validation[: rule.validation_rows]), _rows(test[: rule.test_rows])
    )


def _split_merged(published: Splits, rule: SplitRule, seed: int, silo: str) -> tuple[Units, Units, Units]:
    units = _shuffled(published.train + published.validation, seed, silo, "merged")[: rule.rows_per_silo]
    train, validation = (round(share * len(units)) for share in rule.ratio[:2])
    end = train + validation
    if not 0 < train < end < len(units):
        shares = ":".join(f"{share:g}" for share in rule.ratio)
        raise InputError(
            f"silo {silo!r}: {len(units)} rows are too few to split {shares} into train, validation and test"
        )
    return units[:train], units[train:end], units[end:]


def _complete(published: Splits, rule: SplitRule, seed: int, silo: str) -> tuple[Units, Units, Units]:
    train, validation, test = (
        _shuffled(getattr(published, name), seed, silo, name) for name in ("train", "validation", "test")
    )
    if rule.halve and bool(validation) != bool(test):
        held_out = validation or test
        validation, test = held_out[: len(held_out) // 2], held_out[len(held_out) // 2 :]
    if not test:
        validation, test = [], validation
    if not test:
        raise InputError(f"silo {silo!r}: the data set has neither a test nor a validation split")
    if not validation and rule.validation_rows != 0:
        most = len(train) - max(1, round(0.1 * len(train)))
        kept = most if rule.train_rows is None else min(rule.train_rows, most)
        train, validation = train[:kept], train[kept:]
    return train[: rule.rows_per_silo], validation, test


def _shuffled(rows: Sequence[Row], seed: int, silo: str, purpose: str) -> Units:
    """Return the rows of each unit, the units in an order that is drawn."""
    units: dict[object, list[Row]] = {}
    for index, row in enumerate(rows):
        units.setdefault(row.unit or index, []).append(row)
    shuffled = list(units.values())
    sampler(seed, "rows", purpose, silo).shuffle(shuffled)
    return shuffled


def _rows(units: Units) -> list[Row]:
    return [row for unit in units for row in unit]
