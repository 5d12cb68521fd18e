"""Run the base transformer over a batch with virtual tokens: prompts among the embeddings, prefixes before the keys.

Prompts are vectors before the text's embeddings, or inside the text where the inputs say (`SOFT_AT`). A prefix is keys
and values that every attention layer sees before the text's own. Both are in the attention mask, and neither is in the
returned states. Conventions are those of peft (virtual tokens first, positions counted through, segment 0), so that an
exported part means the same there. One thing differs on purpose: rows that are padded on the left are moved before the
model sees them, so that virtual tokens stand right before the text and a row's states do not depend on the side it is
padded on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from silotune.data.tokenized import SOFT_AT, Inputs
from silotune.errors import InputError
from silotune.models.backbone.architectures import Architecture, first_position, max_positions, position_table

if TYPE_CHECKING:
    from silotune.models.backbone.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Prompt:
    """Virtual tokens before the text.

    Args:
        vectors: shape (rows or 1, tokens, width of the word embeddings).
        present: shape (rows,), whether each row has them; None: all rows do.
    """

    vectors: Tensor
    present: Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of virtual tokens."""
        return self.vectors.shape[1]


@dataclass(frozen=True)
class Prefix:
    """Keys and values before the text's own, one pair per layer.

    Args:
        layers: pairs of shape (rows or 1, key-value heads, tokens, head width).
        present: shape (rows,), whether each row has them; None: all rows do.
        decoder: in an encoder–decoder, whether the decoder's self-attention gets them instead of the encoder's.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    present: Tensor | None = None
    decoder: bool = False

    @property
    def tokens(self) -> int:
        """The number of virtual tokens."""
        return self.layers[0][0].shape[2]


@dataclass
class PreparedInputs:
    """A batch with its virtual tokens in place.

    Args:
        inputs: arguments of the model, without mask: name → tensor of shape (rows, prompt + text tokens, …).
        mask: shape (rows, prefix + prompt + text tokens), as attention sees them.
        virtual: prompt tokens before the text in the model's states.
        prefix: the cache that holds the prefixes; None: there are none.
        prefix_tokens: how many columns of the mask belong to prefixes.
        columns: shape (rows, text tokens), each text token's column in the model's states; None: the text comes after
            the prompt tokens.
    """

    inputs: Inputs
    mask: Tensor
    virtual: int
    prefix: PrefixCache | None
    prefix_tokens: int
    columns: Tensor | None = None

    def of_text(self, states: Tensor) -> Tensor:
        """Select the text's own states: (rows, prompt + text tokens, hidden) → (rows, text tokens, hidden)."""
        return states[:, self.virtual :] if self.columns is None else gather_columns(states, self.columns)


def prepare_inputs(
    base: nn.Module,
    architecture: Architecture | None,
    inputs: Inputs,
    prompts: Sequence[Prompt],
    prefixes: Sequence[Prefix],
    padded_left: bool | None = None,
) -> PreparedInputs:
    """Put virtual tokens before the texts of a batch, or inside them where the inputs say.

    Args:
        base: the base transformer; its word embeddings and table of positions are read.
        architecture: the family's entry; None: positions are left to the model.
        inputs: `input_ids`, `attention_mask` and others, each of shape (rows, tokens); and `SOFT_AT`, shape (rows,),
            where prompts stand inside the text.
        prompts: in order.
        prefixes: in order; they come before the prompts.
        padded_left: whether any row begins with padding; None: the mask tells.
    """
    inputs = dict(inputs)
    ids = inputs["input_ids"]
    rows = len(ids)
    text = inputs.pop("attention_mask", torch.ones_like(ids))
    slot = inputs.pop(SOFT_AT, None)
    virtual_tokens: list[Prompt | Prefix] = [*prefixes, *prompts]
    mask = torch.cat([*(mask_columns(tokens, rows, text) for tokens in virtual_tokens), text], 1)
    virtual = sum(prompt.tokens for prompt in prompts)
    prefix_tokens = sum(prefix.tokens for prefix in prefixes)
    if prompts:
        embedded = cast(Any, base).get_input_embeddings()(inputs.pop("input_ids"))
        vectors = [prompt.vectors.to(embedded.dtype).expand(rows, -1, -1) for prompt in prompts]
        inputs["inputs_embeds"] = torch.cat([*vectors, embedded], 1)
        if "token_type_ids" in inputs:
            token_types = inputs["token_type_ids"]
            inputs["token_type_ids"] = torch.cat([token_types.new_zeros(rows, virtual), token_types], 1)
    columns = None
    if prompts and slot is not None:
        order, columns = _prompt_inside_text(slot, virtual, text.shape[1])
        inputs["inputs_embeds"] = gather_columns(inputs["inputs_embeds"], order)
        if "token_type_ids" in inputs:
            inputs["token_type_ids"] = inputs["token_type_ids"].gather(1, order)
        mask = torch.cat([mask[:, :prefix_tokens], mask[:, prefix_tokens:].gather(1, order)], 1)
    longest = max_positions(base, architecture) if virtual_tokens else None
    if longest is not None and mask.shape[1] > longest:
        raise InputError(
            f"tuner: {mask.shape[1] - text.shape[1]} virtual and {text.shape[1]} text tokens are more than the "
            f"backbone's {longest} positions; lower tuner.tokens or train.max_length"
        )
    some_absent = any(tokens.present is not None for tokens in virtual_tokens)
    if some_absent and architecture is None:
        raise InputError(
            "mix: some rows have virtual tokens and some have none, but it is not known how this backbone places text "
            "(it has no entry in silotune/models/backbone/architectures.py); every mix needs its own forward"
        )
    has_positions = architecture is not None and architecture.positions is not None
    if has_positions and (some_absent or (_padded_left(text) if padded_left is None else padded_left)):
        counted, table = (mask.cumsum(1) - 1).clamp(min=0)[:, prefix_tokens:], position_table(base, architecture)
        inputs["position_ids"] = counted + (0 if table is None else first_position(table))
    cache = None
    if prefixes:
        from silotune.models.backbone.prefix_cache import PrefixCache

        cache = PrefixCache([prefix.layers for prefix in prefixes], rows)
    return PreparedInputs(inputs, mask, virtual, cache, prefix_tokens, columns)


def _prompt_inside_text(slot: Tensor, virtual: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the order of columns that moves prompt tokens from before the text to a slot inside it."""
    text = torch.arange(tokens, device=slot.device)
    text_columns = text + virtual * (text >= slot.unsqueeze(1))
    prompt_columns = slot.unsqueeze(1) + torch.arange(virtual, device=slot.device)
    order = torch.cat([prompt_columns, text_columns], 1).argsort(1)
    return order, text_columns


def pad_on_the_right(inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """Move every row's padding to the right.

    Args:
        inputs: name → tensor of shape (rows, tokens).

    Returns:
        The moved inputs, and the column to which each given column moved, shape (rows, tokens). The latter is None, and
        the inputs are the given ones, if no row was padded on the left.
    """
    mask = inputs.get("attention_mask")
    if mask is None or not _padded_left(mask):
        return inputs, None
    columns = torch.arange(mask.shape[1], device=mask.device)
    first = mask.argmax(1, keepdim=True)
    there, back = (columns + first) % len(columns), (columns - first) % len(columns)
    moved = {
        name: tensor if name.startswith("decoder_") or name == SOFT_AT else tensor.gather(1, there)
        for name, tensor in inputs.items()
    }
    return moved, back


def gather_columns(states: Tensor, columns: Tensor) -> Tensor:
    """Select columns, given as (rows, columns), from states (rows, tokens, hidden); returns (rows, columns, hidden)."""
    return states.gather(1, columns.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def mask_columns(tokens: Prompt | Prefix, rows: int, like: Tensor) -> Tensor:
    """Return the virtual tokens' columns of the attention mask, shape (rows, virtual tokens), of the type of `like`."""
    if tokens.present is None:
        return like.new_ones(rows, tokens.tokens)
    return tokens.present.to(like.dtype).unsqueeze(1).expand(-1, tokens.tokens)


def _padded_left(mask: Tensor) -> bool:
    """Whether any row of a mask, shape (rows, tokens), begins with padding; False for a mask without data."""
    return not isinstance(mask, FakeTensor) and bool((mask[:, 0] == 0).any())


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
    """Run an encoder–decoder, and return its last states.

    Args:
        base: an encoder–decoder with `encoder` and `decoder` (T5).
        batch: the encoder's side. Its prefix is put into the attention modules by the caller.
        decoder: `decoder_input_ids` and, where rows differ in length, `decoder_attention_mask`, each of shape (rows,
            decoder tokens); empty if the encoder alone is to run.
        prefixes: the decoder's prefixes.

    Returns:
        The decoder's last states, shape (rows, decoder tokens, hidden); if `decoder` is empty, the encoder's, shape
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
        from silotune.models.backbone.prefix_cache import decoder_cache

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
