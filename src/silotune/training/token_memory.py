"""Bytes that a forward holds per token, at least and at most; `device_rooms`: what devices have; blocks in a graph.

What is refused goes by the lower bound: nothing that would fit is. What `auto` chooses goes by the upper one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from silotune.config import TrainConfig
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import total_memory

_LEAST = 5
"""Values of the width that a block keeps at least per token for the backward pass: query, key, value, and two norms."""

_MOST, _MOST_ATTENTION, _MOST_INNER = 26, 8, 7
"""Values that it keeps at most per token, for each of the hidden width, of attention's and of the feed-forward's.

Measured with LoRA and dropout at all linear layers, in fp32 and bf16: 18 to 24, 8, and 5 to 6; two such adapters in a
mix keep more.
"""

_PASSING, _PASSING_ATTENTION, _PASSING_INNER = 12, 4, 3
"""Values that it holds at a time without gradient: at least the first number of the hidden width."""

_SCORES = 3
"""Values that eager attention holds per pair of tokens and head, without gradient."""


@dataclass(frozen=True)
class DeviceRoom:
    """A device that holds blocks of a backbone.

    Args:
        total: its whole memory in bytes.
        beside_weights: its memory without the weights that are on it.
        kept: what its blocks keep at most of one token (`most_kept`).
    """

    total: int
    beside_weights: int
    kept: int


def least_kept(backbone: Backbone, checkpointing: bool, blocks: int | None = None) -> float:
    """Return a lower bound of the bytes that a forward keeps per token for its backward pass.

    Args:
        backbone: of a family in the table of architectures.
        checkpointing: whether blocks keep their inputs alone.
        blocks: how many blocks keep anything (`blocks_with_graph`); None: all.
    """
    config, stack = backbone.base.config, backbone.architecture.stacks[0]
    values = backbone.hidden_size
    if not checkpointing:
        inner = int(getattr(config, "intermediate_size", 0) or getattr(config, "d_ff", 0) or 0)
        gated = any(_has(backbone, name) for name in stack.modules("feedforward_gate", 0))
        wide = 3 if gated else 1  # the activation's input; with a gate also its activation and the factor
        values = _LEAST * values + wide * inner
    return (backbone.blocks if blocks is None else blocks) * values * _value_bytes(backbone)


def blocks_with_graph(backbone: Backbone, names: Iterable[str]) -> int:
    """Return how many blocks, of an encoder-decoder its encoder's, a graph passes: those from the first tuned one on.

    Args:
        backbone: of a family in the table of architectures.
        names: names of trained tensors, which begin with those of the modules that they change.
    """
    first, *others = (f"{stack.blocks}." for stack in backbone.architecture.stacks)
    tuned = [name for name in names if not name.startswith(tuple(others))]
    lowest = [int(name.removeprefix(first).split(".")[0]) if name.startswith(first) else 0 for name in tuned]
    return backbone.blocks - min(lowest, default=backbone.blocks)


def most_kept(backbone: Backbone, train: TrainConfig, blocks: int | None = None) -> int:
    """Return an upper bound of what a graph keeps for one token of a row of full length.

    With gradient checkpointing, blocks keep their inputs, and one block at a time keeps all.

    Args:
        backbone: its shapes and precision.
        train: the row's length, dropout, and whether blocks are checkpointed.
        blocks: how many blocks keep it; None: all.
    """
    blocks = sum(_blocks(backbone).values()) if blocks is None else blocks
    width = backbone.hidden_size
    values = _MOST * width + _MOST_ATTENTION * _attention_width(backbone) + _MOST_INNER * _inner_width(backbone)
    of_a_block = values * _value_bytes(backbone) + _kept_scores(backbone, train)
    return of_a_block + blocks * 4 * width if train.gradient_checkpointing else blocks * of_a_block


def passing(backbone: Backbone, length: int) -> int:
    """Return what one block holds for one token of a row of this length, without gradient."""
    width, scores = backbone.hidden_size, _SCORES * _heads(backbone) * length if _is_eager(backbone) else 0
    values = max(_PASSING * width, _PASSING_ATTENTION * width + _PASSING_INNER * _inner_width(backbone))
    return (values + scores) * backbone.word_embeddings.element_size()


def device_rooms(backbone: Backbone, train: TrainConfig) -> list[DeviceRoom]:
    """Return the devices that hold blocks; a graph fits if it fits onto each of them."""
    devices, base = backbone.block_devices, backbone.base
    weights: Counter[torch.device] = Counter()
    for name, tensor in base.named_parameters():
        weights[devices.of(name)] += tensor.nbytes
    weights[devices.main] += sum(tensor.nbytes for tensor in backbone.model.parameters()) - weights.total()
    rooms = []
    for device, blocks in _blocks(backbone).items():
        total = total_memory(device)
        rooms.append(DeviceRoom(total, max(0, total - weights[device]), most_kept(backbone, train, blocks)))
    return rooms


def _blocks(backbone: Backbone) -> Counter[torch.device]:
    """The number of blocks of all stacks on each device that has any."""
    config, known, devices = backbone.base.config, backbone.known_architecture, backbone.block_devices
    if known is None:
        stacks = 2 if config.is_encoder_decoder else 1
        return Counter({devices.main: int(getattr(config, "num_hidden_layers", 1)) * stacks})
    return Counter(
        devices.of(f"{stack.blocks}.{number}")
        for stack in known.stacks
        for number in range(len(backbone.base.get_submodule(stack.blocks)))
    )


def _inner_width(backbone: Backbone) -> int:
    """The width between the two layers of a feed-forward; of experts, of all that one token passes."""
    config = backbone.base.config
    names = ("moe_intermediate_size", "intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim")
    inner = next((int(value) for name in names if (value := getattr(config, name, None))), 4 * backbone.hidden_size)
    return inner * int(getattr(config, "num_experts_per_tok", None) or 1)


def _heads(backbone: Backbone) -> int:
    return int(getattr(backbone.base.config, "num_attention_heads", 0))


def _attention_width(backbone: Backbone) -> int:
    """The width of all heads' queries, which may be more than the hidden one."""
    config, width = backbone.base.config, backbone.hidden_size
    of_a_head = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return _heads(backbone) * int(of_a_head) if of_a_head else width


def _value_bytes(backbone: Backbone) -> int:
    return 4 if backbone.precision == "fp32" else 2


def _is_eager(backbone: Backbone) -> bool:
    return bool(backbone.base.config._attn_implementation == "eager")


def _kept_scores(backbone: Backbone, train: TrainConfig) -> int:
    """Bytes of attention's scores that a graph keeps per token of a row of full length.

    Eager attention keeps the probabilities, in float32 and in the model's type, and what soft caps and dropout make of
    them. Fused attention keeps none; with dropout there is no fused one on a CPU.
    """
    drops = train.dropout not in (None, 0)
    if not _is_eager(backbone) and not (drops and backbone.device.type == "cpu"):
        return 0
    value = _value_bytes(backbone)
    of_a_score = 4 + value + (value if getattr(backbone.base.config, "attn_logit_softcapping", None) else 0)
    return (of_a_score + (value + 1 if drops else 0)) * _heads(backbone) * train.max_length


def _has(backbone: Backbone, module: str) -> bool:
    try:
        backbone.module(module)
    except AttributeError:
        return False
    return True
