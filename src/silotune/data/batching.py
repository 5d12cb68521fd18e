"""Draw the rows of each optimizer step (`Batch`) and cut them into the rows of each forward (`MicroBatch`).

Rows are sorted by length within a batch. That changes neither its rows nor the mathematics, only the amount of padding.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice, pairwise

import torch
from torch import Tensor

from silotune.core.randomness import generator
from silotune.data.tasks import Task
from silotune.data.tokenized import (
    READ_COUNTS,
    READ_POSITIONS,
    READ_ROWS,
    READ_TARGETS,
    SOFT_AT,
    WINDOWS,
    Inputs,
    TokenizedRows,
)
from silotune.errors import InputError

CALL_COST = 64
"""Overhead of one more micro-batch, in tokens (between the optima measured with 1 and 2 CPU threads)."""

CALL_COST_GPU = 64
"""The same for a large model on a GPU, whose weights are read from its memory once a call, whatever the tokens."""

LAUNCH_COST_GPU = 2**37
"""Beside it, what a GPU could do while a call's operations are started, in tokens · weights.

A block's operations take about 0.1 ms to start, however small they are. A token costs work in proportion to the
model's weights, so that the same delay is worth many tokens of a small model and few of a large one: 13,000 of MiniLM
(10.6 M weights beside its embeddings), 21 of a 7 B model. Both numbers are estimated, not measured.
"""


@dataclass(frozen=True)
class TokenLimit:
    """The most tokens that one forward with gradient may hold (`train.tokens_at_once`).

    Args:
        total: tokens, with padding, of all views that have a gradient.
        views: how many those are; each has its own copy of the rows.
        beside: tokens of every row beside its text: virtual ones, and a decoder's.
    """

    total: int
    views: int = 1
    beside: int = 0

    def rows(self, width: int, windows: int = 1) -> int:
        """Return the most rows of a padded width, each of so many windows."""
        of_a_row = self.views * windows * (width + self.beside)
        if of_a_row > self.total:
            views = f" in {self.views} views" if self.views > 1 else ""
            views = f" in {windows} windows{views}" if windows > 1 else views
            beside = f" and {self.beside} beside its text" if self.beside else ""
            raise InputError(
                f"train.tokens_at_once={self.total}: a row of {width} tokens{beside}{views} holds {of_a_row}; allowed: "
                f"at least {of_a_row}, or shorter rows (train.max_length)"
            )
        return self.total // of_a_row


@dataclass(frozen=True)
class Piece:
    """One silo's rows in a micro-batch.

    Args:
        owner: index of the batch (one per silo) that the rows belong to.
        start: position of the first row in that batch; the others follow it.
        width: tokens per row before padding to the other silos' rows.
        inputs: name → tensor of shape (sequences, …), padded to the micro-batch's width; a row read in windows has a
            sequence for each.
    """

    owner: int
    start: int
    width: int
    inputs: Inputs

    def __len__(self) -> int:
        return rows_in(self.inputs)

    @property
    def places(self) -> slice | Tensor:
        """Positions in their batch of the rows of all sequences."""
        if WINDOWS not in self.inputs:
            return self.rows
        return self.start + (self.inputs[WINDOWS] > 0).nonzero()[:, 0]

    @property
    def rows(self) -> slice:
        """Positions of the rows in their batch."""
        return slice(self.start, self.start + len(self))


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward, of one silo or of several silos behind one another.

    Args:
        inputs: the forward's inputs for all rows, name → tensor of shape (rows, …).
        pieces: whose rows they are, in order.
        masked: whether to use masks even where no row has padding, so that kernels do not follow from rows.
    """

    inputs: Inputs
    pieces: tuple[Piece, ...]
    masked: bool = False

    @classmethod
    def alone(cls, inputs: Inputs, start: int = 0) -> MicroBatch:
        """Return the micro-batch of one silo's rows, the first of which is at `start` in its batch."""
        return cls(inputs, (Piece(0, start, inputs["input_ids"].shape[1], inputs),))

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    @property
    def sizes(self) -> list[int]:
        """Number of sequences of each piece."""
        return [len(piece.inputs["input_ids"]) for piece in self.pieces]

    @property
    def width(self) -> int:
        """Tokens per row, with padding."""
        return self.inputs["input_ids"].shape[1]

    def tokens(self, virtual: int) -> int:
        """Return the tokens of all rows: texts and a decoder's with padding, and `virtual` ones for each row."""
        decoder = self.inputs.get("decoder_input_ids")
        return len(self) * (self.width + virtual + (0 if decoder is None else decoder.shape[1]))


@dataclass(frozen=True)
class Batch:
    """One silo's rows of one optimizer step, cut into micro-batches.

    Args:
        task: the task of all rows.
        rows: their indices in `source`, shape (rows,), in the order of the micro-batches.
        labels: their classes, shape (rows,), in the same order.
        micro: the micro-batches; empty if the rows of several silos are cut together (`cohort_batches.py`).
        source: the data set that the rows come from.
        weight: factor of its loss in training: its rows, as a multiple of the epoch's mean, with `train.batches=even`.
    """

    task: Task
    rows: Tensor
    labels: Tensor
    micro: tuple[MicroBatch, ...]
    source: TokenizedRows | None = None
    weight: float = 1.0

    @classmethod
    def of_inputs(
        cls, task: Task, rows: Tensor, labels: Tensor, inputs: Sequence[Inputs], source: TokenizedRows | None = None
    ) -> Batch:
        """Return a batch whose micro-batches have these inputs, one after the other."""
        starts = accumulate(map(rows_in, inputs), initial=0)
        micro = tuple(MicroBatch.alone(each, start) for each, start in zip(inputs, starts, strict=False))
        return cls(task, rows, labels, micro, source)

    def __len__(self) -> int:
        return len(self.rows)

    def piece(self, piece: Piece) -> Batch:
        """Return some of the rows as a batch of one micro-batch."""
        rows = piece.rows
        return Batch(self.task, self.rows[rows], self.labels[rows], (MicroBatch.alone(piece.inputs),), self.source)


def rows_in(inputs: Inputs) -> int:
    """Return the number of rows of a micro-batch's inputs."""
    return len(inputs[WINDOWS] if WINDOWS in inputs else inputs["input_ids"])


def make_batch(
    rows: TokenizedRows,
    indices: Sequence[int],
    pad_id: int,
    call_cost: int | None = CALL_COST,
    limit: TokenLimit | None = None,
    width: int | None = None,
    windows: int = 0,
) -> Batch:
    """Make a batch of chosen rows, cut to minimize padding plus the cost of calls.

    Args:
        rows: the data set.
        indices: of the batch's rows.
        pad_id: token id for padding.
        call_cost: overhead of a micro-batch in tokens; None leaves the batch uncut (without micro-batches).
        limit: the most tokens of a micro-batch; None: any number.
        width: pads tokens and decoder tokens to this length; None: to lengths that follow from the rows.
        windows: fills every row up to so many windows, where rows are read in windows.
    """
    order = sorted(indices, key=lambda row: (rows.width(row), row))
    widths = [width or padded_width(rows, [row]) for row in order]
    counts = [windows or rows.passes(row) for row in order]
    ends = [] if call_cost is None else optimal_cuts(widths, call_cost, counts, limit)
    inputs = [make_inputs(rows, order[start:end], pad_id, width, windows) for start, end in pairwise([0, *ends])]
    index = torch.tensor(order)
    return Batch.of_inputs(rows.task, index, rows.labels[index], inputs, rows)


def optimal_cuts(
    widths: Sequence[int], call_cost: int, counts: Sequence[int] | None = None, limit: TokenLimit | None = None
) -> list[int]:
    """Cut rows sorted by width so that `Σ (rows · widest + call_cost)` is minimal, by dynamic programming.

    Args:
        widths: tokens per row, ascending.
        call_cost: overhead of a micro-batch in tokens.
        counts: number of rows of each width, which stay together. Default: one each.
        limit: the most tokens of a micro-batch; rows that stay together keep to it.

    Returns:
        End position of each micro-batch.
    """
    best, origin = [0.0], [0]
    before = [0, *accumulate(counts or [1] * len(widths))]
    for end in range(1, len(widths) + 1):
        width, first = widths[end - 1], 0
        if limit is not None:
            first = bisect_left(before, before[end] - limit.rows(width))
        costs = {start: best[start] + (before[end] - before[start]) * width + call_cost for start in range(first, end)}
        origin.append(min(costs, key=costs.__getitem__))
        best.append(costs[origin[-1]])
    ends, end = [], len(widths)
    while end:
        ends.append(end)
        end = origin[end]
    return ends[::-1]


def make_inputs(
    rows: TokenizedRows, indices: Sequence[int], pad_id: int, fixed: int | None = None, windows: int = 0
) -> Inputs:
    """Pad chosen rows, in the given order, to the inputs of one forward pass, of a `fixed` length or the least.

    A row read in windows becomes a sequence for each, and for each that fills it up to `windows` its first again.
    """
    width = fixed or padded_width(rows, indices)
    spans = [rows.spans(row) for row in indices]
    filled = [[*own, *own[:1] * (windows - len(own))] for own in spans]
    sequences = [(row, start, end) for row, own in zip(indices, filled, strict=True) for start, end in own]
    ids, mask = pad_lists([rows.ids[row][start:end] for row, start, end in sequences], pad_id, width=width)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if rows.types is not None:
        types = [rows.types[row][start:end] for row, start, end in sequences]
        inputs["token_type_ids"] = pad_lists(types, 0, width=width)[0]
    if rows.windows is not None:
        marks = [[1] * len(own) + [2] * (len(all_) - len(own)) for own, all_ in zip(spans, filled, strict=True)]
        inputs[WINDOWS] = pad_lists(marks, 0, width=max(windows, rows.most_windows))[0]
    if rows.soft is not None:
        inputs[SOFT_AT] = torch.tensor([rows.soft[row] for row in indices])
    if rows.decoder is not None:
        ids, mask = pad_lists([rows.decoder[row] for row in indices], pad_id, width=fixed or 0)
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    if rows.reads is not None:
        begins = accumulate(map(len, filled), initial=0)  # of each row's sequences
        reads = [
            (begin + place, at - own[place][0])
            for begin, row, own in zip(begins, indices, spans, strict=False)
            for at in rows.reads[row]
            for place in [bisect_right(own, (at, 2**62)) - 1]
        ]
        inputs[READ_COUNTS] = torch.tensor([len(rows.reads[row]) for row in indices])
        inputs[READ_ROWS], inputs[READ_POSITIONS] = torch.tensor(reads, dtype=torch.int64).reshape(-1, 2).unbind(1)
    if rows.targets is not None:
        inputs[READ_TARGETS] = torch.tensor([token for row in indices for token in rows.targets[row]])
    return inputs


def padded_width(rows: TokenizedRows, indices: Sequence[int]) -> int:
    """Return the length of the longest chosen row, rounded up to a multiple of 8 but at most the data's longest.

    Kernels are compiled and cached per shape: fewer shapes are faster and need far less memory.
    """
    longest = max(map(rows.width, indices))
    return min(-(-longest // 8) * 8, rows.longest)


def pad_lists(
    lists: Sequence[Sequence[int]], filler: int, *, left: bool = False, width: int = 0
) -> tuple[Tensor, Tensor]:
    """Pad lists of ids to one tensor.

    Returns:
        Ids and attention mask, both of shape (rows, max(width, longest row)).
    """
    longest = max(width, *(len(ids) for ids in lists))

    def pad(ids: Sequence[int], filling: Sequence[int]) -> list[int]:
        return [*filling, *ids] if left else [*ids, *filling]

    ids = torch.tensor([pad(row_ids, [filler] * (longest - len(row_ids))) for row_ids in lists])
    mask = torch.tensor([pad([1] * len(row_ids), [0] * (longest - len(row_ids))) for row_ids in lists])
    return ids, mask


def call_cost_for(device: torch.device, weights: int) -> int:
    """Return the overhead of a forward call, in tokens."""
    return CALL_COST if device.type == "cpu" else CALL_COST_GPU + LAUNCH_COST_GPU // max(1, weights)


def evaluation_batches(
    rows: TokenizedRows, pad_id: int, call_cost: int | None = CALL_COST, rows_at_once: int = 64
) -> Iterator[Batch]:
    """Yield all rows once, sorted by length, in batches of `rows_at_once`, or of fewer that have as many windows."""
    order = sorted(range(rows.examples), key=lambda row: max(len(rows.ids[place]) for place in rows.sequences([row])))
    start = passes = 0
    for end, row in enumerate(order):
        if end > start and passes + rows.passes(row) > rows_at_once:
            yield make_batch(rows, rows.sequences(order[start:end]), pad_id, call_cost)
            start, passes = end, 0
        passes += rows.passes(row)
    if order:
        yield make_batch(rows, rows.sequences(order[start:]), pad_id, call_cost)


def epoch_batches(
    data: Mapping[str, TokenizedRows],
    batch_size: int,
    pad_id: int,
    seed: int,
    *purpose: str | int,
    call_cost: int | None = CALL_COST,
    limit: TokenLimit | None = None,
    even: bool = False,
) -> Iterator[Batch]:
    """Yield one pass over all rows in seeded random order. A batch holds one task; the tasks' batches are mixed.

    `purpose` says what the order is for (silo, round, …; see `core.randomness`), `even` cuts into batches of nearly
    equal sizes (`train.batches`).
    """
    draws = generator(seed, "batches", *purpose)
    chunks: list[tuple[str, list[int]]] = []
    for task in sorted(data):
        order = torch.randperm(data[task].examples, generator=draws).tolist()
        chunks += [(task, indices) for indices in _cut(order, batch_size, even)]
    if len(data) > 1:
        chunks = [chunks[position] for position in torch.randperm(len(chunks), generator=draws).tolist()]
    for task, indices in chunks:
        batch = make_batch(data[task], data[task].sequences(indices), pad_id, call_cost, limit)
        rows = data[task].examples
        yield replace(batch, weight=len(indices) * batch_count(rows, batch_size) / rows) if even else batch


def draw_batches(one_pass: Callable[[int], Iterator[Batch]], number: int, repeats: int = 1) -> Iterator[Batch]:
    """Yield the batches of a phase, pass after pass over the rows, each of which has an order of its own.

    `one_pass` maps the number of earlier passes to the batches of the next (`epoch_batches`). The number of batches may
    end within a pass; each is yielded `repeats` times, one time after the other.
    """
    for batch in islice((batch for done in count() for batch in one_pass(done)), number):
        yield from [batch] * repeats


def batch_count(rows: int, batch_size: int) -> int:
    """Return the number of batches in one pass over rows."""
    return -(-rows // batch_size)


def _cut(order: list[int], batch_size: int, even: bool) -> Iterator[list[int]]:
    """Cut an epoch's rows into batches; of even ones the first may have a row more than the last."""
    if not even:
        yield from (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        return
    count = batch_count(len(order), batch_size)
    ends = [-(-len(order) * number // count) for number in range(count + 1)]
    yield from (order[start:end] for start, end in pairwise(ends))
