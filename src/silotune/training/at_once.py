"""`tokens_at_once`, `rows_scored`, `rows_written`: what goes through the backbone at once; `auto` goes by memory."""

from __future__ import annotations

from collections.abc import Callable

from silotune.config import Config, TrainConfig
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import total_memory
from silotune.models.heads import Head, LanguageModelHead
from silotune.training.token_memory import device_rooms, passing

ON_A_CPU, ON_A_GPU = 64, 512
"""The most rows that `auto` chooses; more do not make a CPU faster, and the second number is chosen, not measured."""

_FOR_GRAPHS = 0.7
"""`auto` gives this part of the memory beside the weights to graphs."""

_FOR_ROWS = 4
"""`auto` takes this part of the device's memory: weights and parts need theirs."""

_WORD_SCORES = 3
"""Values per word and answer that a search holds."""


def tokens_at_once(train: TrainConfig, backbone: Backbone) -> int | None:
    """Return the most tokens of a step's graph; None: any number.

    `auto` goes by the whole memory of each device that has blocks, without the weights there: what is free right now
    could differ on resume, and lead to other bits.
    """
    if train.tokens_at_once != "auto":
        return train.tokens_at_once
    rooms = device_rooms(backbone, train)
    return max(1, min(int(_FOR_GRAPHS * room.beside_weights) // room.kept for room in rooms))


def rows_scored(config: Config, backbone: Backbone) -> int:
    """Return how many rows are classified or embedded at once."""
    return _chosen(config.evaluation.rows_at_once, backbone, lambda: _bytes_of_a_row(config, backbone))


def rows_written(config: Config, backbone: Backbone, head: Head) -> int:
    """Return how many prompts are answered at once."""
    return _chosen(config.generation.rows_at_once, backbone, lambda: _bytes_of_a_prompt(config, backbone, head))


def _chosen(configured: int | str, backbone: Backbone, bytes_of_one: Callable[[], int]) -> int:
    if isinstance(configured, int):
        return configured
    most = ON_A_CPU if backbone.device.type == "cpu" else ON_A_GPU
    memory = min(map(total_memory, backbone.block_devices.all))
    return max(1, min(most, memory // _FOR_ROWS // bytes_of_one()))


def _bytes_of_a_row(config: Config, backbone: Backbone) -> int:
    """Activations of one block over a row of full length."""
    return config.train.max_length * passing(backbone, config.train.max_length)


def _bytes_of_a_prompt(config: Config, backbone: Backbone, head: Head) -> int:
    """Keys, values and word scores of a prompt's beams, and the activations of its prompt."""
    if not isinstance(head, LanguageModelHead):
        return 1  # nothing is written
    beams, new, settings = head.generation.beams, head.generation.max_new_tokens, backbone.base.config
    heads = int(getattr(settings, "num_attention_heads", 1))
    key_heads = int(getattr(settings, "num_key_value_heads", None) or heads)
    width = key_heads * int(getattr(settings, "head_dim", None) or backbone.hidden_size // heads)
    layers = int(getattr(settings, "num_hidden_layers", 1))
    kept = 2 * layers * width * (config.train.max_length + new) * backbone.word_embeddings.element_size()
    words = len(backbone.word_embeddings) * _WORD_SCORES * 4
    return beams * (kept + words) + _bytes_of_a_row(config, backbone)
