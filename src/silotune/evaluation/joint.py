"""Read rows of several models in one forward: for many small silos, and for a server that is asked for many models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from silotune.core.tensors import State
from silotune.data.batching import make_batch
from silotune.data.cohort_batches import cut_jointly
from silotune.data.tokenized import HEAD_INPUTS, HOST_INPUTS, TokenizedRows
from silotune.evaluation.predict import Predictor
from silotune.models.backbone.padding import Padding
from silotune.models.forward.mixing import select_rows
from silotune.models.forward.row_mixes import RowMixes
from silotune.models.forward.views import POOLINGS, View, mean_of_windows
from silotune.training.prediction import PredictionContext

Item = TypeVar("Item")

ModelRows = tuple[Predictor, TokenizedRows]
"""A model and some rows that it reads."""


def inputs_of(rows: TokenizedRows) -> tuple[bool, ...]:
    """Return which inputs beside tokens rows have; rows of one forward have the same."""
    return rows.types is None, rows.soft is None, rows.decoder is None, rows.reads is None


@torch.no_grad()
def read(several: Sequence[ModelRows]) -> list[View]:
    """Return each model's view of its rows, in their order.

    The models have one `Predictor.key`; or there is one model, with one row if its key is None and it weighs texts.
    """
    backbone = several[0][0].context.backbone
    mixes = [predictor.mix(predictor.weigh(rows)) for predictor, rows in several]
    readings = [predictor.head.reading(backbone, rows.task) for predictor, rows in several]
    outputs: list[list[tuple[Tensor, dict[str, Tensor]]]] = [[] for _ in several]
    batches = [make_batch(rows, range(len(rows)), backbone.pad_id, None) for _, rows in several]
    for micro in cut_jointly(batches, backbone.pad_id, backbone.call_cost):
        order = [batches[piece.owner].rows[piece.rows] for piece in micro.pieces]
        own = [select_rows(mixes[piece.owner], batches[piece.owner].rows[piece.places]) for piece in micro.pieces]
        joint, there = RowMixes.merged(own, micro.sizes)
        plan = joint.plan(backbone)
        inputs = {
            name: tensor[there].to(backbone.device) for name, tensor in micro.inputs.items() if name not in HEAD_INPUTS
        }
        states = backbone.encode(inputs, plan, Padding.of(micro.inputs))[there.argsort()]
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        for piece, rows, of_piece in zip(micro.pieces, order, torch.split(states, micro.sizes), strict=True):
            inputs = {
                name: tensor if name in HOST_INPUTS else tensor.to(backbone.device)
                for name, tensor in piece.inputs.items()
            }
            values = {name: mean_of_windows(pool(of_piece, inputs), inputs) for name, pool in POOLINGS.items()}
            reading = readings[piece.owner]
            if reading is not None:
                values[several[piece.owner][0].head.name] = reading(of_piece, inputs, plan)
            outputs[piece.owner].append((rows, values))
    return [_in_order(each, *model) for each, model in zip(outputs, several, strict=True)]


def _in_order(outputs: Sequence[tuple[Tensor, dict[str, Tensor]]], predictor: Predictor, rows: TokenizedRows) -> View:
    order = torch.cat([of_piece for of_piece, _ in outputs])
    values = {name: torch.cat([each[name] for _, each in outputs]) for name in outputs[0][1]}
    back, head = order.argsort(), predictor.head
    view = {name: value[back] for name, value in values.items() if name != head.name or not head.by_position}
    if head.by_position and rows.reads is not None:
        of_rows = torch.split(values[head.name], [len(rows.reads[row]) for row in order.tolist()])
        view[head.name] = torch.cat([of_rows[place] for place in back.tolist()])
    return View(view)


def joint_logits(context: PredictionContext, models: Iterable[tuple[State, TokenizedRows]]) -> Iterator[Tensor | None]:
    """Yield the logits of each model's rows, shape (rows, outputs); as many share a forward as `rows_scored` allows.

    None stands for rows that share it with no other model's; `predict.logits` scores them.
    """
    for group in in_one_forward(models, lambda model: model[1].sequence_count, context.rows_scored):
        yield from _logits_of([(Predictor(context, state), rows) for state, rows in group])


def in_one_forward(items: Iterable[Item], rows: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield successive items in groups that have at most this number of rows, or one item."""
    group, total = list[Item](), 0
    for item in items:
        if group and total + rows(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += rows(item)
    if group:
        yield group


def _logits_of(group: Sequence[ModelRows]) -> Iterator[Tensor | None]:
    """Yield the logits of a group's models, in their order; successive ones with one key share forwards."""
    for (key, _), same in groupby(group, key=lambda each: (each[0].key, inputs_of(each[1]))):
        several = list(same)
        if key is None or len(several) == 1:
            yield from [None] * len(several)
            continue
        for (predictor, rows), view in zip(several, read(several), strict=True):
            yield predictor.logits_of(view, rows.task).float().cpu()
