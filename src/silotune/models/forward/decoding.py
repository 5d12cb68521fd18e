"""Score the next token of answers that grow, each row under its own mix, and keep the keys and values of the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from typing_extensions import override

from silotune.data.batching import pad_lists
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.virtual_tokens import Prefix, encoder_states, mask_columns
from silotune.models.forward.mixing import MixEntry
from silotune.models.forward.row_mixes import RowMixes


def start_decoding(
    backbone: Backbone, prompts: Sequence[Sequence[int]], mix: Sequence[MixEntry] | RowMixes
) -> Decoding:
    """Begin to generate after prompts (token ids per row) under one mix, or those of several models."""
    mixes = mix if isinstance(mix, RowMixes) else RowMixes([mix], [len(prompts)])
    encoder_decoder = bool(backbone.base.config.is_encoder_decoder)
    return (EncoderDecoderDecoding if encoder_decoder else CausalDecoding)(backbone, prompts, mixes)


class Decoding(ABC):
    """A batch of answers that grow by one token at a time; `select` drops or repeats rows on the way."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], mixes: RowMixes) -> None:
        self._backbone = backbone
        self._mixes = mixes
        self._plan = mixes.plan(backbone)
        ids, mask = pad_lists(prompts, backbone.pad_id, left=not backbone.base.config.is_encoder_decoder)
        self._inputs = {"input_ids": ids.to(backbone.device), "attention_mask": mask.to(backbone.device)}
        self.rows = len(prompts)

    @property
    def device(self) -> torch.device:
        """The backbone's device."""
        return self._backbone.device

    @abstractmethod
    def _first(self, plan: ForwardPlan) -> Tensor:
        """Return the states that predict the first token, shape (rows, hidden)."""

    @abstractmethod
    def _next(self, tokens: Tensor) -> Tensor:
        """Return the states, shape (rows, hidden), that predict the token after `tokens`, shape (rows,)."""

    @abstractmethod
    def _reorder(self, index: Tensor) -> None:
        """Select rows, shape (new rows,), of every tensor that has rows."""

    def first(self) -> Tensor:
        """Score the first token: logits of shape (rows, words)."""
        return self._scores(lambda: self._first(self._plan))

    def next(self, tokens: Tensor) -> Tensor:
        """Append one token per row, shape (rows,), and score the next: logits of shape (rows, words)."""
        return self._scores(lambda: self._next(tokens))

    def select(self, rows: Tensor) -> None:
        """Continue with these rows, in this order; a row may be named more than once."""
        self._reorder(rows)
        mixes = self._mixes.mixes
        self._mixes = self._mixes.select(rows)
        if len(mixes) > 1 or any(part.by_row for part in mixes[0]):  # the plan is of the rows
            self._plan = self._mixes.plan(self._backbone)
        self.rows = len(rows)

    @property
    def joins(self) -> bool:
        """Whether rows of another decoding can join; known once this one has begun."""
        return False

    def join(self, other: Decoding) -> Tensor:
        """Continue with the rows of another decoding, too, if this one `joins`.

        Args:
            other: over the same backbone; it has begun, and its mixes can share forwards with these.

        Returns:
            The new order of both decodings' rows, shape (rows,).
        """
        raise NotImplementedError

    def _scores(self, states: Callable[[], Tensor]) -> Tensor:
        lm_head = self._backbone.lm_head
        assert lm_head is not None, "the backbone was loaded without a language-model head"
        with self._backbone.writing(), self._backbone.autocast():
            return lm_head(self._backbone.applied(self._plan, states), None, self._plan.weights)

    def _cache_with(self, prefixes: Sequence[Prefix]) -> KeptKeys:
        """Return a cache that begins with the keys and values of prefixes."""
        backbone = self._backbone
        cache = KeptKeys(backbone.base.config, backbone.autocast_dtype)
        for prefix in prefixes:
            stack = backbone.architecture.stacks[-1 if prefix.decoder else 0]
            for layer, pair in enumerate(prefix.layers):
                device, dtype = backbone.block_devices.of(f"{stack.blocks}.{layer}"), backbone.word_embeddings.dtype
                keys, values = (tensor.expand(self.rows, -1, -1, -1).to(device, dtype) for tensor in pair)
                cache.update(keys, values, layer)
        return cache


class KeptKeys(DynamicCache):
    """Keys and values of a text so far, in the type that products are computed in.

    Args:
        config: the model's configuration, which says what layers look at.
        dtype: rotary embeddings leave keys in float32 under autocast, whose products cast them to this type anyway.
            None: as they come.
    """

    def __init__(self, config: Any, dtype: torch.dtype | None) -> None:
        super().__init__(config=config)
        self._dtype = dtype

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._dtype is not None:
            key_states, value_states = key_states.to(self._dtype), value_states.to(self._dtype)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in cast("list[Any]", self.layers):  # which may be on several devices
            if hasattr(layer, "conv_states"):  # a recurrent mixer's
                layer.reorder_cache(indices)
            else:
                layer.batch_select_indices(indices if layer.keys is None else indices.to(layer.keys.device))

    @property
    def sees_everything(self) -> bool:
        """Whether every layer looks at all tokens before, rather than at a window of them."""
        return all(type(layer) is DynamicLayer for layer in self.layers)


class CausalDecoding(Decoding):
    """A decoder-only model: prompts are padded on the left, so that all rows grow at the same column."""

    @override
    def _first(self, plan: ForwardPlan) -> Tensor:
        backbone = self._backbone
        batch = backbone.prepare_inputs(self._inputs, plan)
        self._cache = self._cache_with(plan.prefixes)
        self._mask = batch.mask
        output = backbone.base(**batch.inputs, attention_mask=self._mask, past_key_values=self._cache, use_cache=True)
        architecture = backbone.known_architecture
        self._counts_positions = architecture is not None and architecture.positions is not None
        return cast(Tensor, output.last_hidden_state)[:, -1]

    @override
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
        """Return the mask as attention takes it, where that is known; else transformers makes it of one row per text.

        transformers reads the mask's values to do without it, for which the host has to wait at every token.
        """
        attention = self._backbone.base.config._attn_implementation
        if not self._counts_positions or not self._cache.sees_everything or attention not in ("sdpa", "eager"):
            return self._mask
        mask = self._mask[:, None, None, :]
        if attention == "sdpa":
            return mask.bool()
        dtype = self._backbone.word_embeddings.dtype
        return (1 - mask).to(dtype) * torch.finfo(dtype).min

    @override
    def _reorder(self, index: Tensor) -> None:
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]

    @property
    @override
    def joins(self) -> bool:
        return self._counts_positions and self._cache.sees_everything

    @override
    def join(self, other: Decoding) -> Tensor:
        other = cast(CausalDecoding, other)
        own, new = self._mixes, other._mixes
        self._mixes, order = RowMixes.merged([*own.mixes, *new.mixes], [*own.sizes, *new.sizes])
        mask = _stack_right([self._mask, other._mask], 1)[order]
        empty = int(mask.any(0).int().argmax())  # columns that only rows had that have left
        self._mask = mask[:, empty:]
        for layer, joining in zip(cast(Any, self._cache.layers), cast(Any, other._cache.layers), strict=True):
            layer.keys = _stack_right([layer.keys, joining.keys], 2)[order, :, empty:]
            layer.values = _stack_right([layer.values, joining.values], 2)[order, :, empty:]
        self._plan = self._mixes.plan(self._backbone)
        self.rows += other.rows
        return order


def _stack_right(tensors: Sequence[Tensor], columns: int) -> Tensor:
    """Concatenate rows of tensors whose columns, a dimension, are filled up with zeros on the left."""
    longest = max(tensor.shape[columns] for tensor in tensors)
    behind = tensors[0].dim() - 1 - columns
    return torch.cat(
        [nn.functional.pad(tensor, (*[0] * (2 * behind), longest - tensor.shape[columns], 0)) for tensor in tensors]
    )


class EncoderDecoderDecoding(Decoding):
    """An encoder–decoder: the prompt is encoded once, the answer grows in the decoder."""

    @override
    def _first(self, plan: ForwardPlan) -> Tensor:
        base = self._backbone.base
        batch = self._backbone.prepare_inputs(self._inputs, plan)
        self._encoded = encoder_states(base, batch)
        self._encoder_mask = batch.mask[:, batch.prefix_tokens :]
        prefixes = [prefix for prefix in plan.prefixes if prefix.decoder]
        looked_at = KeptKeys(base.config, self._backbone.autocast_dtype)
        self._cache = EncoderDecoderCache(self._cache_with(prefixes), looked_at)
        columns = [mask_columns(prefix, self.rows, self._encoder_mask) for prefix in prefixes]
        self._mask = torch.cat([*columns, self._encoder_mask.new_zeros(self.rows, 0)], 1)
        start = int(base.config.decoder_start_token_id)
        return self._next(torch.full((self.rows,), start, device=self.device))

    @override
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

    @override
    def _reorder(self, index: Tensor) -> None:
        cast(Any, self._cache).batch_select_indices(index)
        self._encoded, self._mask = self._encoded[index], self._mask[index]
        self._encoder_mask = self._encoder_mask[index]
