"""Find passages by the cosine of mean states, trained by InfoNCE; the head has no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.config.head import HeadConfig
from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.kinds.retrieval import NEGATIVE, PASSAGE, QUERY, sequences_of
from silotune.data.rows import Row
from silotune.data.targets import target_tensor
from silotune.data.tasks import Task
from silotune.data.tokenized import RowTokenizer, TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.views import View
from silotune.models.heads.base import Head, TokenizeRows


class RetrievalHead(Head):
    """Gives texts vectors of length 1: the mean of a text's states, scaled.

    Args:
        temperature: τ of the loss.
        negatives: most of a row's own negatives; None: all.
        in_batch: whether the passages of a batch's other rows are negatives, too, so that the loss couples rows.
    """

    name = "retrieval"
    task_kind = "retrieval"
    has_tensors = False
    pooling = "mean"

    def __init__(self, temperature: float = 0.05, negatives: int | None = None, in_batch: bool = True) -> None:
        self.temperature, self.negatives, self.couples_rows = temperature, negatives, in_batch

    @classmethod
    @override
    def make(cls, config: HeadConfig) -> Self:
        return cls(config.temperature, config.negatives, config.in_batch)

    @override
    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:
        if backbone.base.config.is_encoder_decoder:
            raise InputError(f"head=retrieval: {backbone.name!r} is an encoder–decoder; allowed: encoders and decoders")

    @override
    def row_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        alone = RowTokenizer(backbone.tokenizer, max_length)
        return RetrievalTokenizer(alone, self.negatives, not self.couples_rows)

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        return {}

    @override
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Compute texts' vectors, shape (sequences, hidden)."""
        return nn.functional.normalize(view[self.pooling], dim=-1)

    @override
    def cross_entropy(self, tensors: Tensors, view: View, batch: Batch) -> Tensor:
        order = torch.argsort(batch.rows)  # a row's sequences are neighbors in the source
        vectors = self.logits(tensors, view, batch.task)
        return info_nce(
            vectors[order.to(vectors.device)],
            batch.labels[order.to(batch.labels.device)].to(vectors.device),
            self.temperature,
            self.couples_rows,
        )

    @override
    def description(self, config: HeadConfig, task: Task) -> dict[str, Any]:
        return {
            "pooling": self.pooling,
            "computes": "vector = x / ‖x‖, where x is the mean of the last layer's states over the text's tokens, "
            "virtual tokens left out; passages are ranked by the dot product with the query's vector",
        }


class RetrievalTokenizer:
    """Tokenizes rows as their query, their passage and their negatives, each cut at the maximum length.

    With `negatives`, rows have so many: the first ones. With `own`, each needs one, and all have the same number: fewer
    are filled up with the row's own passage, which the loss never takes for a negative.
    """

    def __init__(self, tokenize: RowTokenizer, negatives: int | None, own: bool) -> None:
        self._tokenize, self._negatives, self._own = tokenize, negatives, own

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Tokenize rows, or texts alone, which are one sequence each."""
        rows = [self._limited(row, number) for number, row in enumerate(rows, start=1)]
        sequences = [sequences_of(row) for row in rows]
        texts = [Row((text,), 0) for own in sequences for _, text in own]
        return replace(self._tokenize(task, texts), labels=target_tensor(task, rows), sizes=[*map(len, sequences)])

    def _limited(self, row: Row, number: int) -> Row:
        if not isinstance(row.target, tuple) or self._negatives is None:
            return row
        passage, negatives, further = cast("tuple[str, tuple[str, ...], tuple[str, ...]]", row.target)
        negatives = negatives[: self._negatives]
        if self._own and not negatives:
            raise InputError(f"row {number} has no negatives; head.in_batch=false needs a column `negatives`, or true")
        filled = (passage,) * (self._negatives - len(negatives)) if self._own else ()
        return replace(row, target=(passage, (*negatives, *filled), further))


def info_nce(vectors: Tensor, targets: Tensor, temperature: float, in_batch: bool) -> Tensor:
    """Compute InfoNCE (van den Oord et al. 2018), shape (): the mean over rows of −log softmax of the row's passage.

    The softmax is over `cosine / temperature` of the query with its passage, its negatives, and with `in_batch` the
    passages and negatives of all other rows; a passage equal to the row's own is left out.

    Args:
        vectors: of length 1, shape (sequences, hidden), row after row.
        targets: as of `Retrieval.targets`.
        temperature: τ.
        in_batch: whether other rows' passages are negatives.
    """
    role, number = targets.unbind(1)
    of_row = (role == QUERY).cumsum(0)
    right, passages = role == PASSAGE, (role == PASSAGE) | (role == NEGATIVE)
    own = of_row[passages] == of_row[right][:, None]  # (rows, passages)
    positive = own & right[passages]
    left_out = (number[passages] == number[right][:, None]) & ~positive
    if not in_batch:
        left_out = left_out | ~own
    scores = (vectors[role == QUERY] @ vectors[passages].T / temperature).masked_fill(left_out, -torch.inf)
    return (scores.logsumexp(1) - scores[positive]).mean()
