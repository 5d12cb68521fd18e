"""`GenerationCache`: keys and values that grow by a token a step, in place where copying would cost more."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64
"""Tokens by which a buffer grows: between two copies of a layer's cache, new tokens are written in place."""


class GenerationCache(DynamicCache):
    """Past keys and values of a generation.

    Args:
        config: the model's configuration; layers with a sliding window keep transformers' own cache layer.
        dtype: in which keys and values are kept. Rotary embeddings leave keys in float32 under autocast, whose products
            cast them to `dtype` anyway: answers do not change. None: as they come.
        with_room: whether buffers have room for the next tokens, see `room_pays`.
    """

    def __init__(self, config: Any, dtype: torch.dtype | None, with_room: bool) -> None:
        super().__init__(config=config)
        self._dtype = dtype
        if with_room:
            self.layers = [_GrowingLayer(dtype) if type(layer) is DynamicLayer else layer for layer in self.layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, shape (rows, heads, new tokens, head width), to a layer's, and return them all."""
        if self._dtype is not None and not isinstance(self.layers[layer_idx], _GrowingLayer):  # which casts by itself
            key_states, value_states = key_states.to(self._dtype), value_states.to(self._dtype)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Continue with these rows, shape (new rows,), in every layer; layers may be on several devices."""
        for layer in cast("list[Any]", self.layers):
            layer.batch_select_indices(indices if layer.keys is None else indices.to(layer.keys.device))

    @property
    def sees_everything(self) -> bool:
        """Whether every layer looks at all tokens before, rather than at a window of them."""
        return all(type(layer) in (DynamicLayer, _GrowingLayer) for layer in self.layers)


def room_pays(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether writing new tokens in place is faster than copying the cache for each of them.

    It is where products read the filled part of a buffer as it lies. In half precision on a CPU they copy it first, and
    more slowly than transformers' own cache is copied (measured: docs/performance.md).
    """
    return device.type != "cpu" or dtype is None


class _GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values, as views of the filled part of two buffers.

    transformers' own layer copies everything that it holds for every new token.

    Args:
        dtype: of the buffers; None: that of the first keys and values.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        total = past + key_states.shape[-2]
        if not self._buffers or self._buffers[0].shape[-2] < total:
            self._make_room(key_states, value_states, past, total)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, past:total] = new
        self._fill(total)
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        self._buffers = [buffer.index_select(0, indices) for buffer in self._buffers]
        if self._buffers:
            self._fill(length)

    def _fill(self, length: int) -> None:
        """Let the buffers' first tokens be the keys and values."""
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def _make_room(self, key_states: Tensor, value_states: Tensor, past: int, total: int) -> None:
        """Replace the buffers by larger ones with the same content."""
        old, self._buffers = self._buffers, []
        for place, new in enumerate((key_states, value_states)):
            rows, heads, _, width = new.shape
            buffer = new.new_empty(rows, heads, total + ROOM, width, dtype=self._dtype or new.dtype)
            if past:
                buffer[:, :, :past] = old[place][:, :, :past]
            self._buffers.append(buffer)
