"""`CohortMicroBatch`: one forward's rows, of a silo or several; `zip_micro_batches`, `cut_jointly` join silos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor, nn

from silotune.data.batching import Batch, TokenLimit, make_micro_batch, optimal_cuts, padded_width
from silotune.data.tokenized import HEAD_INPUTS, Inputs, TokenizedRows

_TOKENS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class SiloSlice:
    """One silo's rows in a joint micro-batch.

    Args:
        batch_index: index of the batch (one per silo) that the rows belong to.
        start: position of the first row in that batch; the others follow it.
        width: tokens per row before padding to the other silos' rows.
        inputs: forward inputs, padded to the joint micro-batch's width.
    """

    batch_index: int
    start: int
    width: int
    inputs: Inputs

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    @property
    def rows(self) -> slice:
        """Positions of the rows in their batch."""
        return slice(self.start, self.start + len(self))


@dataclass(frozen=True)
class CohortMicroBatch:
    """Inputs of one forward pass: the silos' rows, concatenated."""

    slices: tuple[SiloSlice, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each slice."""
        return [len(piece) for piece in self.slices]

    @property
    def width(self) -> int:
        """Tokens per row, with padding."""
        return self.slices[0].inputs["input_ids"].shape[1]

    def tokens(self, virtual: int) -> int:
        """Return the tokens of all rows: texts and a decoder's with padding, and `virtual` ones for each row."""
        decoder = self.slices[0].inputs.get("decoder_input_ids")
        return sum(self.sizes) * (self.width + virtual + (0 if decoder is None else decoder.shape[1]))

    def model_inputs(self) -> Inputs:
        """Return the model's inputs for all rows, without those that only heads read."""
        first = self.slices[0].inputs
        if len(self.slices) == 1:
            return {name: tensor for name, tensor in first.items() if name not in HEAD_INPUTS}
        return {
            name: torch.cat([piece.inputs[name] for piece in self.slices]) for name in first if name not in HEAD_INPUTS
        }


def own_micro_batches(batch: Batch) -> list[CohortMicroBatch]:
    """Wrap the micro-batches of a single silo's batch."""
    starts = accumulate((len(inputs["input_ids"]) for inputs in batch.micro), initial=0)
    return [
        CohortMicroBatch((SiloSlice(0, start, inputs["input_ids"].shape[1], inputs),))
        for start, inputs in zip(starts, batch.micro, strict=False)
    ]


def zip_micro_batches(batches: Sequence[Batch], pad_id: int, limit: TokenLimit | None = None) -> list[CohortMicroBatch]:
    """Join the batches' first micro-batches, then their second ones, and so on, as many as the limit allows."""
    joint_batches: list[CohortMicroBatch] = []
    starts = [0] * len(batches)
    for number in range(max(len(batch.micro) for batch in batches)):
        parts = []
        for member, batch in enumerate(batches):
            if number < len(batch.micro):
                parts.append((member, starts[member], batch.micro[number]))
                starts[member] += len(batch.micro[number]["input_ids"])
        joint_batches += [_padded_together(group, pad_id) for group in _within(parts, limit)]
    return joint_batches


_Part = tuple[int, int, Inputs]
"""(index of a batch, position of the first row in it, inputs)."""


def _within(parts: Sequence[_Part], limit: TokenLimit | None) -> list[list[_Part]]:
    """Group successive parts so that each group, padded together, keeps to the limit."""
    if limit is None:
        return [list(parts)]
    groups: list[list[_Part]] = []
    rows = width = 0
    for part in parts:
        own_rows, own_width = part[2]["input_ids"].shape
        rows, width = rows + own_rows, max(width, own_width)
        if not groups or rows > limit.rows(width):
            groups.append([])
            rows, width = own_rows, own_width
        groups[-1].append(part)
    return groups


def cut_jointly(
    batches: Sequence[Batch], pad_id: int, call_cost: int, limit: TokenLimit | None = None
) -> list[CohortMicroBatch]:
    """Cut the rows of all batches together, to minimize padding plus the cost of calls.

    Each slice is contiguous in its batch: rows keep their order.

    Args:
        batches: one per silo, each with its `source`.
        pad_id: token id for padding.
        call_cost: overhead of a micro-batch in tokens.
        limit: the most tokens of a micro-batch; None: any number.
    """
    rows = sorted(
        (padded_width(_source(batch), [row]), batch_index, position, row)
        for batch_index, batch in enumerate(batches)
        for position, row in enumerate(batch.rows.tolist())
    )
    width_groups = [(width, list(group_rows)) for width, group_rows in groupby(rows, key=lambda entry: entry[0])]
    if limit is not None:
        width_groups = [
            (width, group_rows[start : start + limit.rows(width)])
            for width, group_rows in width_groups
            for start in range(0, len(group_rows), limit.rows(width))
        ]
    counts = [len(group_rows) for _, group_rows in width_groups]
    ends = optimal_cuts([width for width, _ in width_groups], call_cost, counts, limit)
    joint_batches = []
    for begin, end in pairwise([0, *ends]):
        chosen = sorted(
            (batch_index, position, row)
            for _, group_rows in width_groups[begin:end]
            for _, batch_index, position, row in group_rows
        )
        parts = []
        for batch_index, group in groupby(chosen, key=lambda entry: entry[0]):
            entries = list(group)
            parts.append(
                (
                    batch_index,
                    entries[0][1],
                    make_micro_batch(_source(batches[batch_index]), [row for *_, row in entries], pad_id),
                )
            )
        joint_batches.append(_padded_together(parts, pad_id))
    return joint_batches


def _source(batch: Batch) -> TokenizedRows:
    assert batch.source is not None, "the batch knows its data set"
    return batch.source


def _padded_together(parts: Sequence[_Part], pad_id: int) -> CohortMicroBatch:
    widths = {
        name: max(inputs[name].shape[1] for *_, inputs in parts)
        for name, tensor in parts[0][2].items()
        if tensor.dim() == 2
    }

    def widen(name: str, tensor: Tensor) -> Tensor:
        extra = widths[name] - tensor.shape[1] if name in widths else 0
        return nn.functional.pad(tensor, (0, extra), value=pad_id if name in _TOKENS else 0) if extra else tensor

    return CohortMicroBatch(
        tuple(
            SiloSlice(
                batch_index,
                start,
                inputs["input_ids"].shape[1],
                {name: widen(name, tensor) for name, tensor in inputs.items()},
            )
            for batch_index, start, inputs in parts
        )
    )
