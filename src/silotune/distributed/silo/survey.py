"""Count a silo's rows for a survey: whole numbers, hidden below ten, or with noise on what each unit adds."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silotune.communication.privacy.integer_noise import grid_of, integer_vectors
from silotune.communication.privacy.noise import NoiseStream, with_noise
from silotune.config import Config
from silotune.config.schema import Figure
from silotune.data.long_texts import CUT
from silotune.data.row_checks import SPLITS, row_key
from silotune.data.rows import Row, SiloData
from silotune.data.tasks import Task
from silotune.data.tokenized import ANY_LENGTH, count_cuts
from silotune.distributed.protocol.disclosure import HIDDEN, LEAST_COUNT, Surveyed
from silotune.training.context import TrainingContext

_LENGTHS = tuple(2**power for power in range(4, 14))
"""Upper ends of the bins of lengths, in tokens."""

_YEARS = [*map(str, range(1990, 2050)), "other"]
"""Bins of dates. If they followed from the rows, they would tell of them, with or without noise."""

_ALL = ["in all"]
"""The bin of a figure that has only one."""


@dataclass(frozen=True)
class RowCounts:
    """The counts of a survey.

    Args:
        figures: the figures, each with its bins.
        units: what each unit adds to the bins of all figures in order; shape (units, bins). With noise a unit adds at
            most 1 to all bins of a figure together: each of its rows an equal share, each bin of a row too.
    """

    figures: dict[Figure, Sequence[str]]
    units: Tensor

    def told(self, multiplier: float = 0.0, draws: NoiseStream | None = None) -> Surveyed:
        """Return the counts as they may leave, with Gaussian noise of `multiplier` times what a unit moves them by."""
        totals = self.units.sum(0)
        if draws is not None:
            bound = math.sqrt(len(self.figures))  # at most 1 for each figure, in L1 norm and so in L2 norm
            grid = grid_of(bound, multiplier * bound)
            whole = {"survey": integer_vectors(self.units, bound, grid).sum(0)}
            totals = with_noise(whole, draws, multiplier * bound, grid, "gaussian")["survey"]
        numbers: Iterator[Any] = iter(
            [HIDDEN if count < LEAST_COUNT else count for count in map(round, totals.tolist())]
        )
        return {figure: [(name, next(numbers)) for name in bins] for figure, bins in self.figures.items()}


def count_rows(config: Config, context: TrainingContext, data: SiloData, figures: Sequence[Figure]) -> RowCounts:
    """Count all rows of a silo; with noise its training rows, as others have no units."""
    noised = config.privacy.unit is not None
    rows = [row for split in SPLITS[: 1 if noised else None] for row in getattr(data.splits, split)]
    owners = [row.unit or f"\x1f{place}" for place, row in enumerate(rows)]
    sizes, places = Counter(owners), {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
    of_figures = {figure: _bins(figure, config, context, data.task, rows) for figure in figures}
    columns = {
        name: place for place, name in enumerate((f, name) for f, (bins, _) in of_figures.items() for name in bins)
    }
    units = torch.zeros(len(places), len(columns), dtype=torch.float64)
    for figure, (_, of_rows) in of_figures.items():
        for owner, names in zip(owners, of_rows, strict=True):
            for name in names:
                shares = noised or figure == "units"
                units[places[owner], columns[figure, name]] += 1 / (sizes[owner] * len(names)) if shares else 1
    return RowCounts({figure: bins for figure, (bins, _) in of_figures.items()}, units)


def _bins(
    figure: Figure, config: Config, context: TrainingContext, task: Task, rows: Sequence[Row]
) -> tuple[Sequence[str], list[list[str]]]:
    """Return the names of a figure's bins, which follow from the configuration alone, and the bins of each row."""
    if figure == "units":
        return _ALL, [_ALL] * len(rows)
    if figure == "labels":
        return task.labels, [[task.labels[place] for place in task.rules.label_indices(row)] for row in rows]
    if figure == "dates":
        years = [re.search(r"(?<!\d)\d{4}(?!\d)", row.group) for row in rows]
        return _YEARS, [[year[0] if year is not None and year[0] in _YEARS else _YEARS[-1]] for year in years]
    if figure == "duplicates":
        keys = [row_key(task, row) for row in rows]
        first = {key: place for place, key in reversed([*enumerate(keys)])}
        return _ALL, [_ALL * (first[key] < place) for place, key in enumerate(keys)]
    lengths = (config.train.max_length, ANY_LENGTH)
    head = context.method.setting.head.with_long_texts(CUT)
    tokenize, whole = (head.row_tokenizer(context.backbone, most) for most in lengths)
    cuts = count_cuts(task, rows, tokenize, whole)
    if figure == "cut":
        return _ALL, [_ALL * (place in {*cuts.cut}) for place in range(len(rows))]
    bins = [*(f"up to {most}" for most in _LENGTHS), f"over {_LENGTHS[-1]}"]
    return bins, [[bins[bisect_left(_LENGTHS, length)]] for length in cuts.lengths]
