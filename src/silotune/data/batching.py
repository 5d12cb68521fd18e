"""Tokenized rows and batches. A batch is sorted by length inside and cut into micro-batches with little padding.

Sorting inside a batch changes neither which rows are in it nor the mathematics, only the padding paid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune.core.randomness import generator
from silotune.data.tasks import Task
from silotune.data.tokenized import READ_POSITIONS, READ_ROWS, READ_TARGETS, SOFT_AT, Inputs, TokenizedRows

if TYPE_CHECKING:
    pass


CALL_COST = 64
"""What one more micro-batch costs besides its tokens, in tokens (between the optima measured with 1 and 2 threads)."""

CALL_COST_GPU = 2**14
"""The same on a GPU, where a call of few tokens takes as long as one of many (estimated, not measured)."""

EVALUATION_BATCH_SIZE = 64
"""Rows in a batch without gradient."""


@dataclass(frozen=True)
class Batch:
    """Rows that take one optimizer step together, in micro-batches sorted by length.

    `rows` are their positions in the `TokenizedRows` they come from (`source`), `labels` their classes, both in the
    order of the micro-batches. There are none where rows of several silos are cut together (`data/joint.py`).
    """

    task: Task
    rows: Tensor
    labels: Tensor
    micro: tuple[Inputs, ...]
    source: TokenizedRows | None = None

    def __len__(self) -> int:
        return len(self.rows)


def make_batch(rows: TokenizedRows, chosen: Sequence[int], pad_id: int, call_cost: int | None = CALL_COST) -> Batch:
    """The batch of the chosen rows, cut where padding plus the cost of calls is least; None: it is not cut."""
    order = sorted(chosen, key=lambda row: (len(rows.ids[row]), row))
    ends = [] if call_cost is None else optimal_cuts([padded_width(rows, [row]) for row in order], call_cost)
    micro = tuple(make_micro_batch(rows, order[start:end], pad_id) for start, end in pairwise([0, *ends]))
    index = torch.tensor(order)
    return Batch(rows.task, index, rows.labels[index], micro, rows)


def optimal_cuts(widths: Sequence[int], call_cost: int, counts: Sequence[int] | None = None) -> list[int]:
    """Where to cut rows sorted by width so that `Σ (rows · widest + call_cost)` is least, as end positions.

    `counts`: each width stands for so many rows, which stay together.
    """
    best, origin = [0.0], [0]
    before = [0, *accumulate(counts or [1] * len(widths))]
    for end in range(1, len(widths) + 1):
        costs = [best[start] + (before[end] - before[start]) * widths[end - 1] + call_cost for start in range(end)]
        origin.append(min(range(end), key=costs.__getitem__))
        best.append(costs[origin[-1]])
    ends, end = [], len(widths)
    while end:
        ends.append(end)
        end = origin[end]
    return ends[::-1]


def make_micro_batch(rows: TokenizedRows, chosen: Sequence[int], pad_id: int) -> Inputs:
    """A micro-batch of the chosen rows, in this order."""
    width = padded_width(rows, chosen)
    ids, mask = pad_lists([rows.ids[row] for row in chosen], pad_id, width=width)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if rows.types is not None:
        inputs["token_type_ids"] = pad_lists([rows.types[row] for row in chosen], 0, width=width)[0]
    if rows.soft is not None:
        inputs[SOFT_AT] = torch.tensor([rows.soft[row] for row in chosen])
    if rows.decoder is not None:
        ids, mask = pad_lists([rows.decoder[row] for row in chosen], pad_id)
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    if rows.reads is not None:
        places = [(place, position) for place, row in enumerate(chosen) for position in rows.reads[row]]
        inputs[READ_ROWS], inputs[READ_POSITIONS] = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)
    if rows.targets is not None:
        inputs[READ_TARGETS] = torch.tensor([token for row in chosen for token in rows.targets[row]])
    return inputs


def padded_width(rows: TokenizedRows, chosen: Sequence[int]) -> int:
    """The longest of the chosen rows, rounded up to a multiple of 8 where the data has rows as long as that.

    Kernels are prepared and kept per shape: fewer shapes are faster and take far less memory.
    """
    longest = max(len(rows.ids[row]) for row in chosen)
    return min(-(-longest // 8) * 8, rows.longest)


def pad_lists(
    lists: Sequence[Sequence[int]], filler: int, *, left: bool = False, width: int = 0
) -> tuple[Tensor, Tensor]:
    """Lists of ids as one tensor, shape (rows, longest or `width`), and its attention mask.

    Padded on the right unless `left`.
    """
    longest = max(width, *(len(ids) for ids in lists))

    def line(ids: Sequence[int], missing: Sequence[int]) -> list[int]:
        return [*missing, *ids] if left else [*ids, *missing]

    ids = torch.tensor([line(one, [filler] * (longest - len(one))) for one in lists])
    mask = torch.tensor([line([1] * len(one), [0] * (longest - len(one))) for one in lists])
    return ids, mask


def call_cost_for(device: torch.device) -> int:
    """What a call costs there, in tokens."""
    return CALL_COST if device.type == "cpu" else CALL_COST_GPU


def evaluation_batches(rows: TokenizedRows, pad_id: int, call_cost: int | None = CALL_COST) -> Iterator[Batch]:
    """All rows once, by length, `EVALUATED` at a time."""
    order = sorted(range(len(rows)), key=lambda row: len(rows.ids[row]))
    for start in range(0, len(order), EVALUATION_BATCH_SIZE):
        yield make_batch(rows, order[start : start + EVALUATION_BATCH_SIZE], pad_id, call_cost)


def epoch_batches(
    data: dict[str, TokenizedRows],
    batch_size: int,
    pad_id: int,
    seed: int,
    *purpose: str | int,
    call_cost: int | None = CALL_COST,
) -> Iterator[Batch]:
    """One pass over all rows in derived random order. A batch holds rows of one task; tasks' batches are mixed."""
    draws = generator(seed, "batches", *purpose)
    chunks: list[tuple[str, list[int]]] = []
    for task in sorted(data):
        order = torch.randperm(len(data[task]), generator=draws).tolist()
        chunks += [(task, order[start : start + batch_size]) for start in range(0, len(order), batch_size)]
    if len(data) > 1:
        chunks = [chunks[position] for position in torch.randperm(len(chunks), generator=draws).tolist()]
    for task, chosen in chunks:
        yield make_batch(data[task], chosen, pad_id, call_cost)
