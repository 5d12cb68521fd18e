"""Choose how much goes through the backbone at once where a key says `auto`, by the memory of the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from silotune.config import Config, TrainConfig
from silotune.core.randomness import Stream
from silotune.methods.base import Method
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import total_memory
from silotune.models.forward.mixing import MixEntry, make_plan, parts_in
from silotune.models.heads import Head, LanguageModelHead

ON_A_CPU, ON_A_GPU = 64, 512
"""The most rows that `auto` chooses; more do not make a CPU faster, and the second number is chosen, not measured."""

_FOR_GRAPHS = 0.7
"""The share of the memory beside the weights that `train.tokens_at_once=auto` gives to the graph of a step."""

_FOR_ROWS = 4
"""`auto` gives one part in so many of the memory to rows that are scored or answered."""


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
    adapters = max((len(parts_in(mix)) for phase in method.phases() for mix in phase.views.values()), default=1)
    draws = torch.Generator().manual_seed(0)
    parts = [backbone.place(tuner.init(backbone, [], draws)) for _ in range(max(1, adapters))]
    mix = [MixEntry(tuner, {name: t.requires_grad_() for name, t in part.items()}, 1.0) for part in parts]
    plan = make_plan(backbone, mix).with_dropout(train.dropout)
    columns = min(train.max_length, (backbone.max_tokens or train.max_length) - len(mix) * tuner.virtual_tokens)
    decodes = backbone.lm_head is not None and bool(backbone.base.config.is_encoder_decoder)

    def kept(rows: int) -> int:
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.ones(rows, columns, dtype=torch.int64)
        inputs = {"input_ids": ids, "attention_mask": ids} | ({"decoder_input_ids": ids} if decodes else {})
        with Stream(0, "tokens_at_once"), saved_tensors_hooks(pack, lambda tensor: tensor), backbone.keeping_all():
            states = backbone.encode(backbone.place(inputs), plan)
        assert states.requires_grad
        return sum(found.values())

    of_a_token = (kept(2) - kept(1)) / (columns * (2 if decodes else 1))
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
