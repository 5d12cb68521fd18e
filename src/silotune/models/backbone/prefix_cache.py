"""Hand the keys and values of prefixes to attention, as transformers' cache of the past.

It is imported where a prefix acts: importing transformers takes a second, which `silotune methods` does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from typing_extensions import override

Layers = Sequence[tuple[Tensor, Tensor]]
"""A prefix's keys and values per layer, each of shape (rows or 1, heads, tokens, head width)."""


class PrefixCache(DynamicCache):
    """Past keys and values that hold the prefixes and never grow, because checkpointing runs a block twice.

    The tokens of several prefixes follow one another.
    """

    def __init__(self, prefixes: Sequence[Layers], rows: int) -> None:
        def concatenate(layer: int, which: int) -> Tensor:
            pieces = [prefix[layer][which].expand(rows, -1, -1, -1) for prefix in prefixes]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

        super().__init__([(concatenate(layer, 0), concatenate(layer, 1)) for layer in range(len(prefixes[0]))])

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = cast(Any, self.layers[layer_idx])
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        return (
            torch.cat([keys.to(key_states), key_states], 2),
            torch.cat([values.to(value_states), value_states], 2),
        )


def decoder_cache(prefixes: Sequence[Layers], rows: int) -> EncoderDecoderCache:
    """Return the cache of a decoder whose self-attention gets the prefixes."""
    return EncoderDecoderCache(PrefixCache(prefixes, rows), DynamicCache())
