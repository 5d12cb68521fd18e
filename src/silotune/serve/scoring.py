"""Read several models' texts in shared forwards: labels, numbers, pooled states, and FedDPA's weight of each text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.data.batching import make_batch
from silotune.data.cohort_batches import cut_jointly
from silotune.data.tokenized import HEAD_INPUTS, HOST_INPUTS, TokenizedRows
from silotune.evaluation.instance_vectors import weigh
from silotune.models.backbone.padding import Padding
from silotune.models.forward.mixing import select_rows
from silotune.models.forward.row_mixes import RowMixes
from silotune.models.forward.views import POOLINGS, View
from silotune.serve.models import Served


@dataclass(frozen=True)
class Texts:
    """Some rows of one model."""

    served: Served
    rows: TokenizedRows

    @property
    def inputs(self) -> tuple[bool, ...]:
        """Which inputs beside tokens its rows have; rows of one forward have the same."""
        rows = self.rows
        return rows.types is None, rows.soft is None, rows.decoder is None, rows.reads is None


@torch.no_grad()
def weights(texts: Texts) -> Tensor | None:
    """Return α of each text, shape (texts,), of a model that weighs texts."""
    served = texts.served
    found = weigh(served.model.context, served.model.state, texts.rows) if served.weighs_texts else None
    return None if found is None else found.alpha


@torch.no_grad()
def read(several: Sequence[Texts]) -> list[View]:
    """Return each model's view of its texts, in their order.

    Args:
        several: texts of models with one `Served.key`; or of one model, and if it weighs texts without a key, one text.
    """
    backbone = several[0].served.backbone
    mixes = [each.served.mix(weights(each)) for each in several]
    heads = [each.served.model.context.answering for each in several]
    readings = [head.reading(backbone, each.rows.task) for head, each in zip(heads, several, strict=True)]
    found: list[list[tuple[Tensor, dict[str, Tensor]]]] = [[] for _ in several]
    batches = [make_batch(each.rows, range(len(each.rows)), backbone.pad_id, None) for each in several]
    for micro in cut_jointly(batches, backbone.pad_id, backbone.call_cost):
        order = [batches[piece.owner].rows[piece.rows] for piece in micro.pieces]
        own = [select_rows(mixes[piece.owner], rows) for piece, rows in zip(micro.pieces, order, strict=True)]
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
                values[heads[piece.owner].name] = reading(of_piece, inputs, plan)
            found[piece.owner].append((rows, values))
    return [_in_order(each) for each in found]


def _in_order(found: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> View:
    back = torch.cat([rows for rows, _ in found]).argsort()
    return View({name: torch.cat([values[name] for _, values in found])[back] for name in found[0][1]})
