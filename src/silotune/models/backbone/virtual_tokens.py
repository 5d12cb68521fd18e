"""One forward of the base transformer with virtual tokens: embeddings, masks and positions put together.

Prompts are vectors before the text's embeddings, or inside the text where the inputs say (`SOFT_AT`); a prefix is keys
and values that every attention layer sees before the text's own. Both are in the attention mask, neither is in the
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
from silotune.models.backbone.architectures import Architecture

if TYPE_CHECKING:
    from silotune.models.backbone.kv_prefix import PrefixCache


@dataclass(frozen=True)
class Prompt:
    """Virtual tokens before the text.

    Args:
        vectors: shape (rows or 1, tokens, width of the word embeddings).
        present: shape (rows,), which rows have them; None: all.
    """

    vectors: Tensor
    present: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many."""
        return self.vectors.shape[1]


@dataclass(frozen=True)
class Prefix:
    """Keys and values before the text's own, one pair per layer.

    Args:
        layers: pairs of shape (rows or 1, key-value heads, tokens, head width).
        present: shape (rows,), which rows have them; None: all.
        decoder: in an encoder–decoder, whether the decoder's self-attention gets them instead of the encoder's.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    present: Tensor | None = None
    decoder: bool = False

    @property
    def tokens(self) -> int:
        """How many."""
        return self.layers[0][0].shape[2]


class FunctionalWrapper(nn.Module):
    """A module around another, so that `torch.func.functional_call` reaches code outside its own forward."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, function: Any) -> Any:
        """Call the function."""
        return function()


@dataclass
class PreparedInputs:
    """A batch with its virtual tokens in place.

    Args:
        inputs: what the model is called with, without mask.
        mask: shape (rows, prefix + prompt + text tokens), as attention sees them.
        virtual: prompt tokens before the text in the model's states.
        columns: shape (rows, text tokens), where each token of the text is in the model's states; None: behind the
            prompt tokens.
        prefix: the cache that holds the prefixes, if there are any.
        prefix_tokens: how many columns of the mask belong to it.
    """

    inputs: Inputs
    mask: Tensor
    virtual: int
    prefix: PrefixCache | None
    prefix_tokens: int
    columns: Tensor | None = None

    def of_text(self, states: Tensor) -> Tensor:
        """The states of the text's own tokens, shape (rows, text tokens, hidden)."""
        return states[:, self.virtual :] if self.columns is None else columns_of(states, self.columns)


def prepare_inputs(
    base: nn.Module,
    architecture: Architecture | None,
    inputs: Inputs,
    prompts: Sequence[Prompt],
    prefixes: Sequence[Prefix],
) -> PreparedInputs:
    """Put virtual tokens before a padded batch.

    Raises:
        InputError: where virtual tokens and text are longer together than the model's table of positions.
    """
    inputs = dict(inputs)
    ids = inputs["input_ids"]
    rows = len(ids)
    text = inputs.pop("attention_mask", torch.ones_like(ids))
    inside = inputs.pop(SOFT_AT, None)
    before: list[Prompt | Prefix] = [*prefixes, *prompts]
    mask = torch.cat([*(present(tokens, rows, text) for tokens in before), text], 1)
    virtual = sum(prompt.tokens for prompt in prompts)
    prefix_tokens = sum(prefix.tokens for prefix in prefixes)
    if prompts:
        embedded = cast(Any, base).get_input_embeddings()(inputs.pop("input_ids"))
        vectors = [prompt.vectors.to(embedded.dtype).expand(rows, -1, -1) for prompt in prompts]
        inputs["inputs_embeds"] = torch.cat([*vectors, embedded], 1)
        if "token_type_ids" in inputs:
            segments = inputs["token_type_ids"]
            inputs["token_type_ids"] = torch.cat([segments.new_zeros(rows, virtual), segments], 1)
    columns = None
    if prompts and inside is not None:
        order, columns = _inside(inside, virtual, text.shape[1])
        inputs["inputs_embeds"] = columns_of(inputs["inputs_embeds"], order)
        if "token_type_ids" in inputs:
            inputs["token_type_ids"] = inputs["token_type_ids"].gather(1, order)
        mask = torch.cat([mask[:, :prefix_tokens], mask[:, prefix_tokens:].gather(1, order)], 1)
    table, longest = _positions(base, architecture), positions(base, architecture)
    if longest is not None and before and mask.shape[1] > longest:
        raise InputError(
            f"tuner: {mask.shape[1] - text.shape[1]} virtual and {text.shape[1]} text tokens are more than the "
            f"backbone's {longest} positions; lower tuner.tokens or train.max_length"
        )
    some_absent = any(tokens.present is not None for tokens in before)
    if some_absent and architecture is None:
        raise InputError(
            "mix: some rows have virtual tokens and some have none, but it is not known how this backbone places text "
            "(it has no entry in silotune/architectures.py); every mix needs its own forward"
        )
    placed = architecture is not None and architecture.positions is not None
    if placed and (some_absent or _padded_left(text)):
        counted = (mask.cumsum(1) - 1).clamp(min=0)[:, prefix_tokens:]
        inputs["position_ids"] = counted + (0 if table is None else _start(table))
    cache = None
    if prefixes:
        from silotune.models.backbone.kv_prefix import PrefixCache

        cache = PrefixCache([prefix.layers for prefix in prefixes], rows)
    return PreparedInputs(inputs, mask, virtual, cache, prefix_tokens, columns)


def _inside(before: Tensor, virtual: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Virtual tokens, then text, put into order: which column comes where, and where the text's columns are then.

    Args:
        before: shape (rows,), the token of the text that they come before.
        virtual: how many they are.
        tokens: columns of the text.
    """
    text = torch.arange(tokens, device=before.device)
    moved = text + virtual * (text >= before.unsqueeze(1))
    place = before.unsqueeze(1) + torch.arange(virtual, device=before.device)
    order = torch.cat([place, moved], 1).argsort(1)
    return order, moved


def to_the_left(inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """The batch with every row's padding on the right, and the way back: where each column's state is now."""
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


def columns_of(states: Tensor, back: Tensor) -> Tensor:
    """The chosen columns, shape (rows, columns), of states of shape (rows, tokens, hidden)."""
    return states.gather(1, back.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def plain_forward(base: nn.Module, batch: PreparedInputs) -> Tensor:
    """An encoder's or a decoder's last states, shape (rows, text tokens, hidden)."""
    extra: dict[str, Any] = {}
    if batch.prefix is not None:
        extra["past_key_values"] = batch.prefix
    if getattr(base.config, "use_cache", None):
        extra["use_cache"] = False
    output = base(**batch.inputs, attention_mask=batch.mask, **extra)
    return batch.of_text(cast(Tensor, output.last_hidden_state))


def encoder_states(base: nn.Module, batch: PreparedInputs) -> Tensor:
    """An encoder–decoder's reading of a batch, shape (rows, tokens, hidden)."""
    known = {name: tensor for name, tensor in batch.inputs.items() if name in ("input_ids", "inputs_embeds")}
    return cast(Tensor, cast(Any, base).encoder(**known, attention_mask=batch.mask).last_hidden_state)


def encoder_decoder_forward(
    base: nn.Module, batch: PreparedInputs, decoder: Inputs, prefixes: Sequence[Prefix]
) -> Tensor:
    """The decoder's last states, shape (rows, decoder tokens, hidden); without decoder tokens, the encoder's.

    Args:
        base: an encoder–decoder with `encoder` and `decoder` (T5).
        batch: the encoder's side. Its prefix is put into the attention modules by the caller.
        decoder: `decoder_input_ids` and, where rows differ in length, `decoder_attention_mask`; or nothing.
        prefixes: those of the decoder.
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
        mask = torch.cat([*(present(prefix, len(ids), text) for prefix in prefixes), text], 1)
    output = model.decoder(
        input_ids=ids,
        attention_mask=mask,
        encoder_hidden_states=encoded,
        encoder_attention_mask=batch.mask[:, batch.prefix_tokens :],
        past_key_values=past,
        use_cache=False,
    )
    return cast(Tensor, output.last_hidden_state)


def present(virtual: Prompt | Prefix, rows: int, like: Tensor) -> Tensor:
    """The virtual tokens' columns of the attention mask."""
    if virtual.present is None:
        return like.new_ones(rows, virtual.tokens)
    return virtual.present.to(like.dtype).unsqueeze(1).expand(-1, virtual.tokens)


def _padded_left(text: Tensor) -> bool:
    """Whether any row of a mask begins with padding; a mask without data (`silotune.cost`) has none."""
    return not isinstance(text, FakeTensor) and bool((text[:, 0] == 0).any())


def positions(base: nn.Module, architecture: Architecture | None) -> int | None:
    """How many tokens the model's table of learned positions has room for; None without such a table."""
    table = _positions(base, architecture)
    return None if table is None else table.num_embeddings - _start(table)


def _positions(base: nn.Module, architecture: Architecture | None) -> nn.Embedding | None:
    if architecture is None or architecture.positions in (None, "rotary"):
        return None
    table = base.get_submodule(str(architecture.positions).rpartition(".")[0])
    return cast("nn.Embedding | None", getattr(table, str(architecture.positions).rpartition(".")[2]))


def _start(table: nn.Embedding) -> int:
    """The first token's position: RoBERTa and MPNet count from behind their padding index."""
    return 0 if table.padding_idx is None else table.padding_idx + 1
