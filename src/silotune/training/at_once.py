"""Choose from the device's memory how much goes through the backbone at once, for keys that are set to `auto`.

Three amounts are chosen: the tokens in the graph of a training step, the rows in a forward pass of scoring or
generation, and the silos in a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from silotune.config import Config, TrainConfig
from silotune.core.randomness import Stream
from silotune.errors import InputError
from silotune.methods.base import Method
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import total_memory
from silotune.models.backbone.stored_model import is_causal
from silotune.models.forward.mixing import MixEntry, can_share_forward, make_plan, parts_in
from silotune.models.heads import Head, LanguageModelHead
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo

ON_A_CPU, ON_A_GPU = 64, 512
"""The most rows that `auto` chooses; more do not make a CPU faster, and the second number is chosen, not measured."""

_FOR_GRAPHS = 0.7
"""The share of the memory beside the weights that `train.tokens_at_once=auto` gives to the graph of a step."""

_FOR_ROWS = 4
"""`auto` gives the memory divided by this to rows that are scored or answered."""


def tokens_at_once(train: TrainConfig, backbone: Backbone, method: Method) -> int | None:
    """Return the most tokens that a step's graph may hold; None: any number.

    `auto` goes by the whole memory of the device rather than by what is free at the moment.
    """
    if train.tokens_at_once != "auto":
        return train.tokens_at_once
    return max(1, int(_FOR_GRAPHS * room_for_graphs(backbone) / kept_of_a_token(train, backbone, method)))


def room_for_graphs(backbone: Backbone) -> int:
    """Return the bytes that the backbone's devices have beside its weights; several devices share the work alike."""
    devices = backbone.block_devices.all
    weights: int = sum(tensor.nbytes for tensor in backbone.model.parameters())
    return max(0, min(map(total_memory, devices)) * len(devices) - weights)


def kept_of_a_token(train: TrainConfig, backbone: Backbone, method: Method) -> float:
    """Measure the bytes that a graph keeps per token, by the difference of forward passes of one and two rows."""
    tuner = method.setting.tuner
    adapters = max((len(parts_in(mix)) for phase in method.local_phases() for mix in phase.views.values()), default=1)
    draws = torch.Generator().manual_seed(0)
    parts = [backbone.place(tuner.init(backbone, [], draws)) for _ in range(max(1, adapters))]
    mix = [MixEntry(tuner, {name: t.requires_grad_() for name, t in part.items()}, 1.0) for part in parts]
    plan = make_plan(backbone, mix).with_dropout(train.dropout)
    columns = min(train.max_length, (backbone.max_tokens or train.max_length) - len(mix) * tuner.virtual_tokens)
    decodes = backbone.lm_head is not None and bool(backbone.base.config.is_encoder_decoder)

    def graph_bytes(rows: int) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.ones(rows, columns, dtype=torch.int64)
        inputs = {"input_ids": ids, "attention_mask": ids} | ({"decoder_input_ids": ids} if decodes else {})
        with Stream(0, "tokens_at_once"), saved_tensors_hooks(pack, lambda tensor: tensor), backbone.keeping_all():
            states = backbone.encode(backbone.place(inputs), plan)
        assert states.requires_grad
        return sum(sizes.values())

    of_a_token = (graph_bytes(2) - graph_bytes(1)) / (columns * (2 if decodes else 1))
    backbone.rest()
    if not train.gradient_checkpointing:
        return of_a_token
    blocks = sum(len(backbone.base.get_submodule(stack.blocks)) for stack in backbone.architecture.stacks)
    return of_a_token / blocks + 4 * blocks * backbone.hidden_size  # the inside of one block, and every block's input


def rows_scored(config: Config, backbone: Backbone) -> int:
    """Return how many rows are classified or embedded at once."""
    return _rows(config.evaluation.rows_at_once, backbone, lambda: _bytes_of_a_row(config, backbone))


def rows_written(config: Config, backbone: Backbone, head: Head) -> int:
    """Return how many prompts are answered at once."""
    if not isinstance(head, LanguageModelHead):
        return ON_A_CPU  # nothing is written
    options, width = head.generation, 2 * backbone.hidden_size * int(backbone.base.config.num_hidden_layers)
    cache = width * (config.train.max_length + options.max_new_tokens) * backbone.word_embeddings.element_size()
    scores = 12 * len(backbone.word_embeddings)
    of_a_prompt = options.beams * (cache + scores)
    return _rows(config.generation.rows_at_once, backbone, lambda: of_a_prompt + _bytes_of_a_row(config, backbone))


def _rows(configured: int | str, backbone: Backbone, bytes_of_one: Callable[[], int]) -> int:
    if isinstance(configured, int):
        return configured
    most = ON_A_CPU if backbone.device.type == "cpu" else ON_A_GPU
    memory = min(map(total_memory, backbone.block_devices.all))
    return max(1, min(most, memory // _FOR_ROWS // bytes_of_one()))


def _bytes_of_a_row(config: Config, backbone: Backbone) -> int:
    """Count the numbers that one block holds at a time for a row of full length: wide layers and attention."""
    length, heads = config.train.max_length, int(getattr(backbone.base.config, "num_attention_heads", 1))
    return length * (16 * backbone.hidden_size + 3 * heads * length) * backbone.word_embeddings.element_size()


MANY_SILOS = 64
"""From this number of silos on, `cohort=auto` is the default."""

COHORT_ON_A_CPU, COHORT_ON_A_GPU = 8, 32
"""The largest cohort of `cohort=auto`; the second number is chosen, not measured."""

ROWS_ON_A_CPU = 256
"""Silos with small batches train in larger cohorts, of this many rows."""


@dataclass(frozen=True)
class Cohort:
    """The number of silos that train together; `reason` says why `auto` chose no more."""

    size: int = 1
    reason: str = ""


ALONE = Cohort()


def choose_cohort(configured: int | str | None, context: TrainingContext, silos: Collection[Silo]) -> Cohort:
    """Choose how many silos of a run train together.

    A configured number is taken, or refused if silos cannot share a forward; `auto` is as many as memory has room for,
    and 1 where sharing does not pay. None is 1, and `auto` where there are many silos.
    """
    if configured is None and len(silos) < MANY_SILOS:
        return ALONE
    obstacle = _obstacle(context)
    if isinstance(configured, int):
        if configured > 1 and obstacle:
            raise InputError(f"cohort={configured}: {obstacle}; allowed: cohort=1 or auto")
        return Cohort(configured)
    backbone = context.backbone
    if backbone.device.type == "cpu" and is_causal(backbone.base.config):  # docs/results/engineering.md
        obstacle = obstacle or "on a CPU silos of a causal model train faster one by one"
    return Cohort(1, obstacle) if obstacle else _fitting(context, silos)


def _fitting(context: TrainingContext, silos: Collection[Silo]) -> Cohort:
    """Return the largest cohort whose activations of full-length rows fit into half of the memory that is left."""
    backbone, settings = context.backbone, context.train
    batch = max(1, min(settings.batch_size, max((silo.rows for silo in silos), default=settings.batch_size)))
    virtual, long = context.virtual_tokens, context.head.long_texts
    windows = long.per_row if long.in_windows else 1
    # tokens of a silo's batch of rows of full length, each of the sequences of the row with most
    of_a_view = batch * max(
        (
            windows * max(rows.sizes or [1]) * (settings.max_length + virtual + rows.longest_decoder)
            for silo in silos
            for rows in silo.train.values()
        ),
        default=settings.max_length,
    )
    replicas = max(context.replicas(phase) for phase in context.phases)
    of_a_token = kept_of_a_token(settings, backbone, context.method)
    room, reason = int(room_for_graphs(backbone) / 2 / (of_a_view * replicas * of_a_token)), "half the memory"
    bound = context.tokens_at_once
    if bound is not None:
        views = max(phase.views_with_gradient for phase in context.phases)
        if (of_bound := bound // (of_a_view * max(1, views))) <= room:
            room, reason = of_bound, f"train.tokens_at_once={bound}"
    most = max(COHORT_ON_A_CPU, ROWS_ON_A_CPU // batch) if backbone.device.type == "cpu" else COHORT_ON_A_GPU
    if room < most:
        return Cohort(max(1, room), f"{reason} has room for {room}")
    return Cohort(most)


def _obstacle(context: TrainingContext) -> str:
    """Return why silos cannot share a forward; empty if they can."""
    backbone = context.backbone
    if context.train.dropout:
        return "silos cannot share a forward with train.dropout, which every silo draws for itself"
    if context.head.forwards_again:
        return f"silos cannot share a forward with label words of several tokens (head={context.head.name})"
    for tuner in context.tuners:
        if not can_share_forward(backbone, tuner):
            return (
                f"silos cannot share a forward with tuner={tuner.name} on {backbone.model_type} (where a tuner only "
                "changes what layers take and give, row by row, they can)"
            )
        if tuner.draws and backbone.base.config.is_encoder_decoder:
            return f"silos cannot share a forward of an encoder–decoder with dropout in tuner={tuner.name}"
    return ""
