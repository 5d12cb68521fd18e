"""`check_step_memory` refuses, before training, steps that need more memory than the device has free."""

from __future__ import annotations

from collections.abc import Sequence

from silotune.core.tensors import State, count_parameters
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.device import GIB, free_memory
from silotune.models.tuners import tuner_of
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo
from silotune.training.token_memory import blocks_with_graph, least_kept

_STATES = 4
"""Tensors of a part's size while it trains: itself, its gradient, and the two moments of Adam."""


def check_step_memory(context: TrainingContext, silos: Sequence[Silo], state: State) -> None:
    """Refuse a run in which an average batch of a silo cannot fit.

    The estimate is a lower bound, from shapes and the lengths of rows: every run that it refuses would end for lack of
    memory. Families without an entry in the table of architectures are not estimated.

    Args:
        context: backbone, method and training options.
        silos: whose rows train.
        state: the shared parts, and private ones if they are known; others are not counted.
    """
    backbone = context.backbone
    if backbone.known_architecture is None:
        return
    views = max((phase.views_with_gradient for phase in context.phases if phase.trains), default=0)
    sets = [rows for silo in silos for rows in silo.train.values()]
    if not views or not sets:
        return
    rows = max(sets, key=lambda rows: _batch_tokens(rows, context.train.batch_size))
    batch = _batch_tokens(rows, context.train.batch_size)
    tokens, bound = batch * views, context.tokens_at_once
    held = tokens if bound is None else min(tokens, bound)
    parts = (
        _STATES
        * 4
        * max(sum(count_parameters(state[name]) for name in phase.trains if name in state) for phase in context.phases)
    )
    free = sum(map(free_memory, backbone.block_devices.all)) - backbone.resting_bytes
    blocks = _blocks_with_graph(context, silos, state)
    needed = held * least_kept(backbone, context.train.gradient_checkpointing, blocks) + parts
    if needed <= free:
        return
    devices = " and ".join(map(str, backbone.block_devices.all))
    raise InputError(
        f"train: a batch of about {round(batch)} tokens in {views} views keeps at least {needed / GIB:.1f} GiB "
        f"for its backward pass, and {devices} has {max(free, 0) / GIB:.1f} GiB free; "
        f"{_remedy(context, free - parts, tokens, rows, blocks)}"
    )


def _blocks_with_graph(context: TrainingContext, silos: Sequence[Silo], state: State) -> int:
    """Return how many blocks a step's graph passes; a tuner may act in the last ones alone (`tuner.sites`)."""
    if any(tuner.trains_backbone for tuner in context.tuners):
        return context.backbone.blocks
    tuners = [name for name, part in context.parts.items() if tuner_of(part.module) is not None]
    if not any(name in state for name in tuners):
        state = context.state_of(silos[0]).private
    return blocks_with_graph(context.backbone, [key for name in tuners for key in state.get(name, {})])


def _remedy(context: TrainingContext, room: int, tokens: float, rows: TokenizedRows, blocks: int) -> str:
    """Name the keys under which a batch of so many tokens in a graph of some blocks fits into the room (bytes)."""
    fitting = []
    checkpointing = context.train.gradient_checkpointing
    if not checkpointing and tokens * least_kept(context.backbone, True, blocks) <= room:
        fitting.append("train.gradient_checkpointing=true")
    of_a_token = least_kept(context.backbone, checkpointing, blocks)
    at_once = int(room / of_a_token)
    longest = max(map(len, rows.ids))
    if at_once >= longest:
        fitting.append(f"train.tokens_at_once={at_once}")
    fraction = room / (tokens * of_a_token)
    if (length := int(longest * fraction)) >= 8:
        fitting.append(f"train.max_length={length}")
    if (size := int(context.train.batch_size * fraction)) >= 1:
        fitting.append(f"train.batch_size={size}")
    if not fitting:
        return "no shorter row would fit; use backbone.quantization, a smaller backbone or a larger device"
    return f"what would fit, each alone: {', '.join(fitting)}"


def _batch_tokens(rows: TokenizedRows, batch_size: int) -> float:
    """Return the tokens of an average batch, without padding; a preference pair has those of both answers."""
    sequences = len(rows.sequences(range(min(batch_size, rows.examples))))
    return sum(map(len, rows.ids)) / max(len(rows.ids), 1) * sequences
