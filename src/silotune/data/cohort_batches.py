"""Batches of several silos as one: their rows are cut into joint micro-batches, where each silo's are a segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from silotune.data.batching import Batch, make_micro_batch, optimal_cuts, padded_width
from silotune.data.tokenized import HEAD_INPUTS, Inputs, TokenizedRows

_TOKENS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class SiloSlice:
    """One silo's rows in a joint micro-batch.

    Args:
        batch_index: which of the batches they are of.
        start: the first one's place in its batch; the others follow.
        width: tokens they have without what they were padded with beside other silos' rows.
        inputs: padded to the joint micro-batch's width.
    """

    batch_index: int
    start: int
    width: int
    inputs: Inputs

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    @property
    def rows(self) -> slice:
        """Their places in their batch."""
        return slice(self.start, self.start + len(self))


@dataclass(frozen=True)
class CohortMicroBatch:
    """A joint micro-batch: the silos' rows behind one another."""

    slices: tuple[SiloSlice, ...]

    @property
    def sizes(self) -> list[int]:
        """Rows of each piece."""
        return [len(piece) for piece in self.slices]

    @property
    def width(self) -> int:
        """Tokens of every row, with padding."""
        return self.slices[0].inputs["input_ids"].shape[1]

    def model_inputs(self) -> Inputs:
        """What the model is given: all rows, without what heads read."""
        first = self.slices[0].inputs
        if len(self.slices) == 1:
            return {name: tensor for name, tensor in first.items() if name not in HEAD_INPUTS}
        return {
            name: torch.cat([piece.inputs[name] for piece in self.slices]) for name in first if name not in HEAD_INPUTS
        }


def own_micro_batches(batch: Batch) -> list[CohortMicroBatch]:
    """A batch's own micro-batches."""
    return zip_micro_batches([batch], 0)


def zip_micro_batches(batches: Sequence[Batch], pad_id: int) -> list[CohortMicroBatch]:
    """The first micro-batches of all beside one another, then the second ones, and so on."""
    joints: list[CohortMicroBatch] = []
    starts = [0] * len(batches)
    for place in range(max(len(batch.micro) for batch in batches)):
        found = []
        for member, batch in enumerate(batches):
            if place < len(batch.micro):
                found.append((member, starts[member], batch.micro[place]))
                starts[member] += len(batch.micro[place]["input_ids"])
        joints.append(_widened(found, pad_id))
    return joints


def cut_jointly(batches: Sequence[Batch], pad_id: int, call_cost: int) -> list[CohortMicroBatch]:
    """All rows of all batches, sorted by length and cut where padding plus the cost of calls is least.

    A piece is a stretch of its batch: rows of a batch keep their order.
    """
    rows = sorted(
        (padded_width(_source(batch), [row]), member, place, row)
        for member, batch in enumerate(batches)
        for place, row in enumerate(batch.rows.tolist())
    )
    runs = [(width, list(run)) for width, run in groupby(rows, key=lambda entry: entry[0])]
    ends = optimal_cuts([width for width, _ in runs], call_cost, [len(run) for _, run in runs])
    joints = []
    for begin, end in pairwise([0, *ends]):
        some = sorted((member, place, row) for _, run in runs[begin:end] for _, member, place, row in run)
        found = []
        for member, own in groupby(some, key=lambda entry: entry[0]):
            places = list(own)
            found.append(
                (member, places[0][1], make_micro_batch(_source(batches[member]), [row for *_, row in places], pad_id))
            )
        joints.append(_widened(found, pad_id))
    return joints


def _source(batch: Batch) -> TokenizedRows:
    assert batch.source is not None, "a batch of rows that are known"
    return batch.source


def _widened(found: Sequence[tuple[int, int, Inputs]], pad_id: int) -> CohortMicroBatch:
    widths = {
        name: max(inputs[name].shape[1] for *_, inputs in found)
        for name, tensor in found[0][2].items()
        if tensor.dim() == 2
    }

    def wide(name: str, tensor: Tensor) -> Tensor:
        missing = widths[name] - tensor.shape[1] if name in widths else 0
        return nn.functional.pad(tensor, (0, missing), value=pad_id if name in _TOKENS else 0) if missing else tensor

    return CohortMicroBatch(
        tuple(
            SiloSlice(
                member, start, inputs["input_ids"].shape[1], {name: wide(name, one) for name, one in inputs.items()}
            )
            for member, start, inputs in found
        )
    )
