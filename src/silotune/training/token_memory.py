"""`least_kept`, `most_kept`: bounds of the bytes that a forward holds per token; `room_for_steps` is what there is.

What is refused goes by the lower bound: nothing that would fit is. What `auto` chooses goes by the upper one.
"""

from __future__ import annotations

from silotune.config import TrainConfig
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device_memory import total_memory

_LEAST = 5
"""Values of the width that a block keeps at least per token for the backward pass: query, key, value, and two norms."""

_MOST = 40
"""Values that it keeps at most, per unit of width (34 in a plain block)."""

_PASSING = 12
"""Values that it holds at a time without gradient, per unit of width."""

_SCORES = 3
"""Values that eager attention holds per pair of tokens and head."""


def least_kept(backbone: Backbone, checkpointing: bool) -> float:
    """Return a lower bound of the bytes that a forward keeps per token for its backward pass.

    Args:
        backbone: of a family in the table of architectures.
        checkpointing: whether blocks keep their inputs alone.
    """
    config, stack = backbone.base.config, backbone.architecture.stacks[0]
    values = backbone.hidden_size
    if not checkpointing:
        inner = int(getattr(config, "intermediate_size", 0) or getattr(config, "d_ff", 0) or 0)
        gated = any(_has(backbone, name) for name in stack.modules("feedforward_gate", 0))
        wide = 3 if gated else 1  # the activation's input; with a gate also its activation and the factor
        values = _LEAST * values + wide * inner
    return backbone.blocks * values * _value_bytes(backbone)


def most_kept(backbone: Backbone, train: TrainConfig) -> int:
    """Return an upper bound of what a graph keeps for one token of a row of full length.

    With gradient checkpointing, blocks keep their inputs, and one block at a time keeps all.

    Args:
        backbone: its shapes and precision.
        train: the row's length, and whether blocks are checkpointed.
    """
    width, blocks = backbone.hidden_size, _blocks(backbone)
    of_a_block = (width * _MOST + _scores(backbone, train.max_length)) * _value_bytes(backbone)
    return of_a_block + blocks * 4 * width if train.gradient_checkpointing else blocks * of_a_block


def passing(backbone: Backbone, length: int) -> int:
    """Return what one block holds for one token of a row of this length, without gradient."""
    return (backbone.hidden_size * _PASSING + _scores(backbone, length)) * backbone.word_embeddings.element_size()


def room_for_steps(backbone: Backbone) -> int:
    """Return the memory of the backbone's devices beside its weights."""
    weights: int = sum(tensor.nbytes for tensor in backbone.model.parameters())
    return max(0, sum(map(total_memory, backbone.block_devices.all)) - weights)


def _blocks(backbone: Backbone) -> int:
    """The blocks of all stacks."""
    config, known = backbone.base.config, backbone.known_architecture
    if known is None:
        return int(getattr(config, "num_hidden_layers", 1)) * (2 if config.is_encoder_decoder else 1)
    return sum(len(backbone.base.get_submodule(stack.blocks)) for stack in known.stacks)


def _value_bytes(backbone: Backbone) -> int:
    return 4 if backbone.precision == "fp32" else 2


def _scores(backbone: Backbone, length: int) -> int:
    """Values of eager attention per token of a row of this length; other attention holds none."""
    config = backbone.base.config
    heads: int = getattr(config, "num_attention_heads", 0) if config._attn_implementation == "eager" else 0
    return _SCORES * heads * length


def _has(backbone: Backbone, module: str) -> bool:
    try:
        backbone.module(module)
    except AttributeError:
        return False
    return True
