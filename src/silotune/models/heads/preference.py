"""`PreferenceHead`: DPO (Rafailov et al. 2023) on preference pairs; the backbone alone is the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.errors import InputError
from silotune.models.forward.views import View
from silotune.models.heads.lm import LanguageModelHead

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig


class PreferenceHead(LanguageModelHead):
    """Trains on pairs of a chosen and a rejected answer; answers as the language-model head does.

    Attributes:
        beta: β, how strongly the model is kept near the reference.
    """

    name = "dpo"
    pairs = True
    reads_reference = True
    beta: float = 0.1

    @classmethod
    @override
    def make(cls, config: HeadConfig) -> Self:
        head = super().make(config)
        head.beta = config.beta
        return head

    def referenced_loss(self, tensors: Tensors, view: View, reference: View, batch: Batch) -> Tensor:
        """See `Head.referenced_loss`; equation 7 of the paper, the mean over pairs.

        `-log σ(β (log π(chosen) - log π_ref(chosen) - log π(rejected) + log π_ref(rejected)))`, where the probability
        of an answer is the product over its tokens.
        """
        margins = self._log_ratio(view, batch) - self._log_ratio(reference, batch)
        return -nn.functional.logsigmoid(self.beta * margins).mean()

    def _log_ratio(self, view: View, batch: Batch) -> Tensor:
        """Return `log p(chosen) - log p(rejected)` of each pair, shape (pairs,)."""
        if batch.source is None or not batch.source.pairs:
            raise InputError("head=dpo: needs preference pairs (columns prompt, chosen, rejected); allowed: head=lm")
        losses = view[self.name][:, 0]
        order = torch.argsort(batch.rows).to(losses.device)  # a pair's two rows are neighbors in the source
        chosen, rejected = (-losses[order]).reshape(-1, 2).unbind(1)
        return chosen - rejected

    def cross_entropy(self, tensors: Tensors, view: View, batch: Batch) -> Tensor:
        """Refuse: the loss needs the reference."""
        raise InputError("head=dpo: this method's loss is of labels or tokens, not of preference pairs")

    @override
    def loss_units(self, batch: Batch) -> int | None:
        """A pair's loss depends on two rows."""
        return None

    @override
    def description(self, config: HeadConfig, task: Any) -> dict[str, Any]:
        return super().description(config, task) | {"loss": f"DPO, beta = {self.beta:g}"}
