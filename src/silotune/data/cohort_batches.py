"""Join the batches of silos that train together into micro-batches, cut alone (`join`) or together (`cut_jointly`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from silotune.data.batching import Batch, MicroBatch, Piece, TokenLimit, make_inputs, optimal_cuts, padded_width
from silotune.data.tokenized import HEAD_INPUTS, Inputs, TokenizedRows

_TOKENS = ("input_ids", "decoder_input_ids")

_Entry = tuple[int, int, int, int]
"""A row's width, its batch's number, its position there, and its index in the data set."""


def join(batches: Sequence[Batch], pad_id: int, limit: TokenLimit | None = None) -> list[MicroBatch]:
    """Join the batches' first micro-batches, then their second ones, and so on, as many as the limit allows."""
    if len(batches) == 1:
        return list(batches[0].micro)
    joint: list[MicroBatch] = []
    for number in range(max(len(batch.micro) for batch in batches)):
        pieces = [
            Piece(owner, piece.start, piece.width, piece.inputs)
            for owner, batch in enumerate(batches)
            for micro_batch in batch.micro[number : number + 1]
            for piece in micro_batch.pieces
        ]
        joint += [_padded_together(group, pad_id) for group in _within(pieces, limit)]
    return joint


def _within(pieces: Sequence[Piece], limit: TokenLimit | None) -> list[list[Piece]]:
    """Group successive pieces so that each group, padded together, keeps to the limit."""
    if limit is None:
        return [list(pieces)]
    groups: list[list[Piece]] = []
    rows = width = 0
    for piece in pieces:
        sequences = len(piece.inputs["input_ids"])
        rows, width = rows + sequences, max(width, piece.width)
        if not groups or rows > limit.rows(width):
            groups.append([])
            rows, width = sequences, piece.width
        groups[-1].append(piece)
    return groups


def cut_jointly(
    batches: Sequence[Batch], pad_id: int, call_cost: int, limit: TokenLimit | None = None
) -> list[MicroBatch]:
    """Cut the rows of all batches together, to minimize padding plus the cost of calls.

    Each piece is contiguous in its batch: rows keep their order.
    """
    rows = sorted(
        (padded_width(_source(batch), [row]), owner, position, row)
        for owner, batch in enumerate(batches)
        for position, row in enumerate(batch.rows.tolist())
    )
    width_groups = [(width, list(group_rows)) for width, group_rows in groupby(rows, key=lambda entry: entry[0])]

    def passes(entry: _Entry) -> int:
        return _source(batches[entry[1]]).passes(entry[3])

    if limit is not None:
        width_groups = [
            (width, some) for width, group_rows in width_groups for some in _few(group_rows, passes, limit.rows(width))
        ]
    counts = [sum(map(passes, group_rows)) for _, group_rows in width_groups]
    ends = optimal_cuts([width for width, _ in width_groups], call_cost, counts, limit)
    joint = []
    for begin, end in pairwise([0, *ends]):
        members = sorted(entry[1:] for _, group_rows in width_groups[begin:end] for entry in group_rows)
        pieces = []
        for owner, group in groupby(members, key=lambda entry: entry[0]):
            entries = list(group)
            inputs = make_inputs(_source(batches[owner]), [row for *_, row in entries], pad_id)
            pieces.append(Piece(owner, entries[0][1], inputs["input_ids"].shape[1], inputs))
        joint.append(_padded_together(pieces, pad_id))
    return joint


def _few(entries: Sequence[_Entry], passes: Callable[[_Entry], int], most: int) -> Iterator[list[_Entry]]:
    """Divide rows so that each group has at most so many sequences."""
    group: list[_Entry] = []
    for entry in entries:
        if group and sum(map(passes, [*group, entry])) > most:
            yield group
            group = []
        group.append(entry)
    yield group


def _source(batch: Batch) -> TokenizedRows:
    assert batch.source is not None, "the batch knows its data set"
    return batch.source


def _padded_together(pieces: Sequence[Piece], pad_id: int) -> MicroBatch:
    """Return the micro-batch of some silos' rows, all padded to the longest."""
    first = pieces[0].inputs
    widths = {
        name: max(piece.inputs[name].shape[1] for piece in pieces)
        for name, tensor in first.items()
        if tensor.dim() == 2 and name not in HEAD_INPUTS
    }

    def widen(name: str, tensor: Tensor) -> Tensor:
        extra = widths[name] - tensor.shape[1] if name in widths else 0
        return nn.functional.pad(tensor, (0, extra), value=pad_id if name in _TOKENS else 0) if extra else tensor

    padded: list[Inputs] = [{name: widen(name, tensor) for name, tensor in piece.inputs.items()} for piece in pieces]
    whole = {name: torch.cat([each[name] for each in padded]) for name in first if name not in HEAD_INPUTS}
    return MicroBatch(
        padded[0] if len(pieces) == 1 else whole,
        tuple(Piece(piece.owner, piece.start, piece.width, each) for piece, each in zip(pieces, padded, strict=True)),
    )
