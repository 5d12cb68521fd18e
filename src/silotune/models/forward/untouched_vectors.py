"""Keep the vector of every row under the untouched backbone, over all rounds, for views without any part."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from silotune.data.batching import make_inputs
from silotune.data.tokenized import HEAD_INPUTS, TokenizedRows
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.padding import Padding
from silotune.models.forward.views import POOLINGS


class UntouchedVectors:
    """Poolings of the backbone's states, by set of rows; a set's are computed together when one is first read.

    Each row goes through the backbone alone and without padding, so that its vectors have the same bits whatever the
    other rows are. They are freed with their set.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._tables: dict[int, dict[str, Tensor]] = {}

    def of(self, source: TokenizedRows) -> dict[str, Tensor]:
        """Return the vectors of a set's rows: pooling's name → tensor of shape (rows of the set, hidden)."""
        if id(source) not in self._tables:
            rows = [self._poolings(source, row) for row in range(len(source))]
            self._tables[id(source)] = {name: torch.stack([own[name] for own in rows]) for name in POOLINGS}
            weakref.finalize(source, self._tables.pop, id(source))
        return self._tables[id(source)]

    @torch.no_grad()
    def _poolings(self, source: TokenizedRows, row: int) -> dict[str, Tensor]:
        """Compute one row's vectors, shape (hidden,) each."""
        inputs, tokens = make_inputs(source, [row], self._backbone.pad_id), len(source.ids[row])
        inputs = {
            name: tensor if name.startswith("decoder_") or tensor.dim() < 2 else tensor[:, :tokens]
            for name, tensor in inputs.items()
            if name not in HEAD_INPUTS
        }
        text = {name: tensor.to(self._backbone.device) for name, tensor in inputs.items()}
        states = self._backbone.encode(text, ForwardPlan(), Padding.of(inputs))
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        return {name: pool(states, text)[0] for name, pool in POOLINGS.items()}
