"""`plain_forward` and `encoder_decoder_forward`: the base transformer over inputs with virtual tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from silotune.data.tokenized import Inputs
from silotune.models.backbone.virtual_tokens import Prefix, PreparedInputs, mask_columns


def plain_forward(base: nn.Module, batch: PreparedInputs) -> Tensor:
    """Run an encoder or a decoder; returns its last states, shape (rows, text tokens, hidden)."""
    extra: dict[str, Any] = {}
    if batch.prefix is not None:
        extra["past_key_values"] = batch.prefix
    if getattr(base.config, "use_cache", None):
        extra["use_cache"] = False
    output = base(**batch.inputs, attention_mask=batch.mask, **extra)
    return batch.of_text(cast(Tensor, output.last_hidden_state))


def encoder_states(base: nn.Module, batch: PreparedInputs) -> Tensor:
    """Run an encoder–decoder's encoder; returns its states, shape (rows, prompt + text tokens, hidden)."""
    arguments = {name: tensor for name, tensor in batch.inputs.items() if name in ("input_ids", "inputs_embeds")}
    return cast(Tensor, cast(Any, base).encoder(**arguments, attention_mask=batch.mask).last_hidden_state)


def encoder_decoder_forward(
    base: nn.Module, batch: PreparedInputs, decoder: Inputs, prefixes: Sequence[Prefix]
) -> Tensor:
    """Run an encoder–decoder.

    Args:
        base: an encoder–decoder with `encoder` and `decoder` (T5).
        batch: the encoder's side. Its prefix is put into the attention modules by the caller.
        decoder: `decoder_input_ids` and, where rows differ in length, `decoder_attention_mask`, each of shape (rows,
            decoder tokens); or nothing.
        prefixes: those of the decoder.

    Returns:
        The decoder's last states, shape (rows, decoder tokens, hidden); without decoder tokens the encoder's, shape
        (rows, text tokens, hidden).
    """
    model = cast(Any, base)
    encoded = encoder_states(base, batch)
    if "decoder_input_ids" not in decoder:
        return batch.of_text(encoded)
    ids = decoder["decoder_input_ids"]
    mask = decoder.get("decoder_attention_mask")
    past = None
    if prefixes:
        from silotune.models.backbone.kv_prefix import decoder_cache

        past = decoder_cache([prefix.layers for prefix in prefixes], len(ids))
        text = torch.ones_like(ids) if mask is None else mask
        mask = torch.cat([*(mask_columns(prefix, len(ids), text) for prefix in prefixes), text], 1)
    output = model.decoder(
        input_ids=ids,
        attention_mask=mask,
        encoder_hidden_states=encoded,
        encoder_attention_mask=batch.mask[:, batch.prefix_tokens :],
        past_key_values=past,
        use_cache=False,
    )
    return cast(Tensor, output.last_hidden_state)
