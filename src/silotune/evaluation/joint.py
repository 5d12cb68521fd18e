"""Read rows of several models in one forward: for many small silos, and for a server that is asked for many models."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.data.batching import make_batch
from silotune.data.cohort_batches import cut_jointly
from silotune.data.tokenized import HEAD_INPUTS, HOST_INPUTS, TokenizedRows
from silotune.evaluation.instance_vectors import weigh
from silotune.methods.step import head_tensors
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.padding import Padding
from silotune.models.forward.mixing import fold_entries, select_rows
from silotune.models.forward.row_mixes import Mixed, RowMixes, sharing_key
from silotune.models.forward.views import POOLINGS, View
from silotune.models.heads import Head
from silotune.training.prediction import PredictionContext


@dataclass(frozen=True)
class ModelRows:
    """Some rows of one model: the mix that acts on them, and the head that reads them."""

    rows: TokenizedRows
    mix: Mixed
    head: Head


def inputs_of(rows: TokenizedRows) -> tuple[bool, ...]:
    """Return which inputs beside tokens rows have; rows of one forward have the same."""
    return rows.types is None, rows.soft is None, rows.decoder is None, rows.reads is None


@torch.no_grad()
def read(backbone: Backbone, several: Sequence[ModelRows]) -> list[View]:
    """Return each model's view of its rows, in their order; the mixes have one `sharing_key`, or there is one model."""
    readings = [each.head.reading(backbone, each.rows.task) for each in several]
    found: list[list[tuple[Tensor, dict[str, Tensor]]]] = [[] for _ in several]
    batches = [make_batch(each.rows, range(len(each.rows)), backbone.pad_id, None) for each in several]
    for micro in cut_jointly(batches, backbone.pad_id, backbone.call_cost):
        order = [batches[piece.owner].rows[piece.rows] for piece in micro.pieces]
        own = [select_rows(several[piece.owner].mix, rows) for piece, rows in zip(micro.pieces, order, strict=True)]
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
            values = {name: pool(of_piece, inputs) for name, pool in POOLINGS.items()}
            reading = readings[piece.owner]
            if reading is not None:
                values[several[piece.owner].head.name] = reading(of_piece, inputs, plan)
            found[piece.owner].append((rows, values))
    return [_in_order(each) for each in found]


def _in_order(found: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> View:
    back = torch.cat([rows for rows, _ in found]).argsort()
    return View({name: torch.cat([values[name] for _, values in found])[back] for name in found[0][1]})


def joint_logits(context: PredictionContext, models: Iterable[tuple[State, TokenizedRows]]) -> Iterator[Tensor | None]:
    """Yield the logits of each model's rows, shape (rows, outputs); as many share a forward as `rows_scored` allows.

    None stands for rows that share it with no other model's; `predict.logits` scores them.
    """
    group: list[_Prepared] = []
    for state, rows in models:
        prepared = _prepare(context, state, rows)
        if sum(len(each.read.rows) for each in [*group, prepared]) > context.rows_scored:
            yield from _logits_of(context, group)
            group = []
        group.append(prepared)
    yield from _logits_of(context, group)


@dataclass(frozen=True)
class _Prepared:
    read: ModelRows
    head: Tensors
    key: Hashable


@torch.no_grad()
def _prepare(context: PredictionContext, state: State, rows: TokenizedRows) -> _Prepared:
    placed, weights = context.place(state), weigh(context, state, rows)
    mix = fold_entries(context.backbone, context.prediction_mix(placed, None if weights is None else weights.alpha))
    read = ModelRows(rows, [part for part in mix if part.present], context.answering)
    key = sharing_key(context.backbone, read.mix)
    return _Prepared(
        read, head_tensors(context.prediction.head, placed), None if key is None else (key, inputs_of(rows))
    )


@torch.no_grad()
def _logits_of(context: PredictionContext, group: Sequence[_Prepared]) -> Iterator[Tensor | None]:
    """Yield the logits of a group's models, in their order; successive ones with one key share forwards."""
    for key, same in groupby(group, key=lambda each: each.key):
        several = list(same)
        if key is None or len(several) == 1:
            yield from [None] * len(several)
            continue
        for each, view in zip(several, read(context.backbone, [each.read for each in several]), strict=True):
            yield context.answering.logits(each.head, view, each.read.rows.task).float().cpu()
