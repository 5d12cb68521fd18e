"""`Decoding`: a batch's generation in progress with its cache, for decoder-only and encoder–decoder models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from silotune.data.batching import pad_lists
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.base_forward import encoder_states
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.generation_cache import GenerationCache, room_pays
from silotune.models.backbone.virtual_tokens import Prefix, mask_columns
from silotune.models.forward.mixing import MixEntry, make_plan, select_rows


def start_decoding(backbone: Backbone, prompts: Sequence[Sequence[int]], mix: Sequence[MixEntry]) -> Decoding:
    """Begin to generate after prompts (token ids per row) under a mix whose weights may have shape (rows,)."""
    encoder_decoder = bool(backbone.base.config.is_encoder_decoder)
    return (EncoderDecoderDecoding if encoder_decoder else CausalDecoding)(backbone, prompts, mix)


class Decoding(ABC):
    """Rows that grow by one token at a time. Rows may be dropped or repeated on the way (`select`).

    Args:
        backbone: loaded with its language-model head.
        prompts: token ids per row.
        mix: a weight may have shape (rows,).
    """

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
        """The backbone's device."""
        return self._backbone.device

    @abstractmethod
    def _first(self, plan: ForwardPlan) -> Tensor:
        """The states that predict the first token, shape (rows, hidden)."""

    @abstractmethod
    def _next(self, tokens: Tensor) -> Tensor:
        """The states, shape (rows, hidden), that predict the token after `tokens`, shape (rows,)."""

    @abstractmethod
    def _reorder(self, index: Tensor) -> None:
        """Select rows, shape (new rows,), of every tensor that has rows."""

    def first(self) -> Tensor:
        """Score the first token: logits of shape (rows, words)."""
        return self._scores(lambda: self._first(self._plan))

    def next(self, tokens: Tensor) -> Tensor:
        """Append one token per row, shape (rows,), and score the next: logits of shape (rows, words)."""
        return self._scores(lambda: self._next(tokens))

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Continue with these rows, in this order; a row may be named more than once. A tensor is on the device."""
        if not isinstance(rows, Tensor) and list(rows) == list(range(self.rows)):
            return
        index = rows if isinstance(rows, Tensor) else torch.tensor(rows, device=self.device)
        self._reorder(index)
        self._mix = select_rows(self._mix, index)
        if any(part.by_row for part in self._mix):
            self._plan = make_plan(self._backbone, self._mix)
        self.rows = len(index)

    def _scores(self, states: Callable[[], Tensor]) -> Tensor:
        lm_head = self._backbone.lm_head
        assert lm_head is not None, "the backbone was loaded without a language-model head"
        with self._backbone.autocast():
            return lm_head(self._backbone.applied(self._plan, states), None, self._plan.weights)

    def _cache_with(self, prefixes: Sequence[Prefix]) -> GenerationCache:
        """A cache that begins with the keys and values of prefixes."""
        backbone = self._backbone
        kept = backbone.autocast_dtype
        cache = GenerationCache(backbone.base.config, kept, room_pays(backbone.device, kept))
        for prefix in prefixes:
            stack = backbone.architecture.stacks[-1 if prefix.decoder else 0]
            for layer, pair in enumerate(prefix.layers):
                device, dtype = backbone.block_devices.of(f"{stack.blocks}.{layer}"), backbone.word_embeddings.dtype
                keys, values = (tensor.expand(self.rows, -1, -1, -1).to(device, dtype) for tensor in pair)
                cache.update(keys, values, layer)
        return cache


class CausalDecoding(Decoding):
    """A decoder-only model: prompts are padded on the left, so that all rows grow at the same column."""

    def _first(self, plan: ForwardPlan) -> Tensor:
        backbone = self._backbone
        batch = backbone.prepare_inputs(self._inputs, plan)
        self._cache = self._cache_with(plan.prefixes)
        self._mask = batch.mask
        output = backbone.base(**batch.inputs, attention_mask=self._mask, past_key_values=self._cache, use_cache=True)
        architecture = backbone.known_architecture
        self._counts_positions = architecture is not None and architecture.positions is not None
        self._attention = str(backbone.base.config._attn_implementation)
        self._takes_finished_mask = self._counts_positions and self._cache.sees_everything
        return cast(Tensor, output.last_hidden_state)[:, -1]

    def _next(self, tokens: Tensor) -> Tensor:
        positions = {"position_ids": self._mask.sum(1, keepdim=True)} if self._counts_positions else {}
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.rows, 1)], 1)
        output = self._backbone.base(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self._attention_mask(),
            past_key_values=self._cache,
            use_cache=True,
            **positions,
        )
        return cast(Tensor, output.last_hidden_state)[:, -1]

    def _attention_mask(self) -> Tensor:
        """The mask as attention takes it, where that is known; else transformers makes it of one row per text.

        transformers reads the mask's values to do without it, for which the host has to wait at every token.
        """
        if self._takes_finished_mask and self._attention == "sdpa":
            return self._mask[:, None, None, :].bool()
        if self._takes_finished_mask and self._attention == "eager":
            dtype = self._backbone.word_embeddings.dtype
            hidden = (1 - self._mask[:, None, None, :]).to(dtype)
            return hidden * torch.finfo(dtype).min
        return self._mask

    def _reorder(self, index: Tensor) -> None:
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]


class EncoderDecoderDecoding(Decoding):
    """An encoder–decoder: the prompt is encoded once, the answer grows in the decoder."""

    def _first(self, plan: ForwardPlan) -> Tensor:
        base = self._backbone.base
        batch = self._backbone.prepare_inputs(self._inputs, plan)
        self._encoded = encoder_states(base, batch)
        self._encoder_mask = batch.mask[:, batch.prefix_tokens :]
        prefixes = [prefix for prefix in plan.prefixes if prefix.decoder]
        looked_at = GenerationCache(base.config, self._backbone.autocast_dtype, with_room=False)
        self._cache = EncoderDecoderCache(self._cache_with(prefixes), looked_at)
        columns = [mask_columns(prefix, self.rows, self._encoder_mask) for prefix in prefixes]
        self._mask = torch.cat([*columns, self._encoder_mask.new_zeros(self.rows, 0)], 1)
        start = int(base.config.decoder_start_token_id)
        return self._next(torch.full((self.rows,), start, device=self.device))

    def _next(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.rows, 1)], 1)
        output = self._backbone.base.decoder(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self._mask,
            encoder_hidden_states=self._encoded,
            encoder_attention_mask=self._encoder_mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        return cast(Tensor, output.last_hidden_state)[:, -1]

    def _reorder(self, index: Tensor) -> None:
        cast(Any, self._cache).batch_select_indices(index)
        self._encoded, self._mask = self._encoded[index], self._mask[index]
        self._encoder_mask = self._encoder_mask[index]
