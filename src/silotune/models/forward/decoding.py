"""One batch's generation in progress: the cache of keys and values, and one more token a row under the plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from silotune.data.batching import pad_lists
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.virtual_tokens import Prefix, encoder_states, present
from silotune.models.forward.mixing import MixEntry, make_plan, select_rows


def start(backbone: Backbone, prompts: Sequence[Sequence[int]], mix: Sequence[MixEntry]) -> Decoding:
    """Begin to generate behind prompts (token ids per row) under a mix whose weights may be one per row."""
    several = bool(backbone.base.config.is_encoder_decoder)
    return (EncoderDecoderDecoding if several else CausalDecoding)(backbone, prompts, mix)


class Decoding(ABC):
    """Rows that grow by a token at a time. Their number may change: rows are dropped, or continued several times."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], mix: Sequence[MixEntry]) -> None:
        self._backbone = backbone
        self._mix = list(mix)
        self._plan = make_plan(backbone, mix)
        pad = backbone.pad_id
        ids, mask = pad_lists(prompts, pad, left=not backbone.base.config.is_encoder_decoder)
        self._inputs = {"input_ids": ids.to(backbone.device), "attention_mask": mask.to(backbone.device)}
        self.rows = len(prompts)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._backbone.device

    @abstractmethod
    def _first(self, plan: ForwardPlan) -> Tensor:
        """The states, shape (rows, hidden), that predict the first token."""

    @abstractmethod
    def _next(self, tokens: Tensor) -> Tensor:
        """The states that predict the token behind `tokens`."""

    @abstractmethod
    def _reorder(self, index: Tensor) -> None:
        """Keep these rows of everything that has rows."""

    def first(self) -> Tensor:
        """The first token's scores, shape (rows, words)."""
        return self._scores(lambda: self._first(self._plan))

    def next(self, tokens: Tensor) -> Tensor:
        """Take one token a row, shape (rows,), and give the next one's scores, shape (rows, words)."""
        return self._scores(lambda: self._next(tokens))

    def select(self, index: Tensor) -> None:
        """Go on with these rows, shape (new rows,), in this order; a row may be named more than once."""
        if torch.equal(index, torch.arange(self.rows, device=index.device)):
            return
        self._reorder(index)
        self._mix = select_rows(self._mix, index)
        if any(part.by_row for part in self._mix):
            self._plan = make_plan(self._backbone, self._mix)
        self.rows = len(index)

    def _scores(self, states: Callable[[], Tensor]) -> Tensor:
        vocabulary = self._backbone.vocabulary
        assert vocabulary is not None, "the backbone was loaded without a language-model head"
        with self._backbone.autocast():
            return vocabulary(self._backbone.applied(self._plan, states), None, self._plan.weights)

    def _prefixed(self, prefixes: Sequence[Prefix]) -> DynamicCache:
        """A cache that begins with prefixes."""
        cache = DynamicCache(config=self._backbone.base.config)
        dtype = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        for prefix in prefixes:
            for layer, pair in enumerate(prefix.layers):
                keys, values = (
                    tensor.expand(self.rows, -1, -1, -1).to(dtype or self._backbone.word_embeddings.dtype)
                    for tensor in pair
                )
                cache.update(keys, values, layer)
        return cache


class CausalDecoding(Decoding):
    """A decoder alone: prompts are padded on the left, so that all rows grow at the same place."""

    def _first(self, plan: ForwardPlan) -> Tensor:
        batch = self._backbone.prepare_inputs(self._inputs, plan)
        self._cache: Cache = self._prefixed(plan.prefixes)
        self._mask = batch.mask
        output = self._backbone.base(
            **batch.inputs, attention_mask=self._mask, past_key_values=self._cache, use_cache=True
        )
        return cast(Tensor, output.last_hidden_state)[:, -1]

    def _next(self, tokens: Tensor) -> Tensor:
        known = self._backbone.known
        positions: dict[str, Any] = {}
        if known is not None and known.positions is not None:
            positions["position_ids"] = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.rows, 1)], 1)
        output = self._backbone.base(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            **positions,
        )
        return cast(Tensor, output.last_hidden_state)[:, -1]

    def _reorder(self, index: Tensor) -> None:
        cast(Any, self._cache).batch_select_indices(index)
        self._mask = self._mask[index]


class EncoderDecoderDecoding(Decoding):
    """An encoder–decoder: the prompt is read once, the answer grows in the decoder."""

    def _first(self, plan: ForwardPlan) -> Tensor:
        base = self._backbone.base
        batch = self._backbone.prepare_inputs(self._inputs, plan)
        self._encoded = encoder_states(base, batch)
        self._seen = batch.mask[:, batch.prefix_tokens :]
        behind = [prefix for prefix in plan.prefixes if prefix.decoder]
        self._cache = EncoderDecoderCache(self._prefixed(behind), DynamicCache(config=base.config))
        columns = [present(prefix, self.rows, self._seen) for prefix in behind]
        self._mask = torch.cat([*columns, self._seen.new_zeros(self.rows, 0)], 1)
        begin = int(base.config.decoder_start_token_id)
        return self._next(torch.full((self.rows,), begin, device=self.device))

    def _next(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.rows, 1)], 1)
        output = self._backbone.base.decoder(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self._mask,
            encoder_hidden_states=self._encoded,
            encoder_attention_mask=self._seen,
            past_key_values=self._cache,
            use_cache=True,
        )
        return cast(Tensor, output.last_hidden_state)[:, -1]

    def _reorder(self, index: Tensor) -> None:
        cast(Any, self._cache).batch_select_indices(index)
        self._encoded, self._seen, self._mask = self._encoded[index], self._seen[index], self._mask[index]
