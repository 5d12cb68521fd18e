"""`rows_scored` and `rows_written`: rows scored, and prompts answered, in one batch; `auto` goes by memory."""

from __future__ import annotations

from collections.abc import Callable

from silotune.config import Config
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads import Head, LanguageModelHead
from silotune.training.cohort import memory_of

ON_A_CPU, ON_A_GPU = 64, 512
"""The most rows that `auto` chooses; more do not make a CPU faster, and the second number is chosen, not measured."""

_SHARE = 4
"""`auto` takes this part of the device's memory: weights and parts need theirs."""

_KEPT = 12
"""Values that one block holds per token and unit of width at a time, without gradient."""

_SCORES = 3
"""Values that it holds per pair of tokens and attention head; values per word and answer that a search holds."""


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
    return max(1, min(most, memory_of(backbone.device) // _SHARE // bytes_of_one()))


def _bytes_of_a_row(config: Config, backbone: Backbone) -> int:
    """Activations of one block over a row of full length."""
    length, settings = config.train.max_length, backbone.base.config
    scores = _SCORES * int(getattr(settings, "num_attention_heads", 0)) * length
    return length * (backbone.hidden_size * _KEPT + scores) * backbone.word_embeddings.element_size()


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
    words = len(backbone.word_embeddings) * _SCORES * 4
    return beams * (kept + words) + _bytes_of_a_row(config, backbone)
