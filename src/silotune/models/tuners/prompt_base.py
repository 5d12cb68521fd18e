"""Share code of prompt tuning, P-tuning and prefix tuning: initial vectors, and mixes of vectors.

A mix interpolates the vectors of equally many tokens: `Σ weight·vector`, usually with weights that sum to 1. Rows whose
weights sum to 0 have no virtual tokens: their positions are masked out, because zero vectors would still get attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.virtual_tokens import Prompt
from silotune.models.tuners.base import MergedAdapter, Tuner, WeightedTensors, weighted_sum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_TENSOR = "prompt_embeddings"
"""The one tensor of a part after `Tuner.reparametrize`, as peft saves it: shape (tokens, width)."""

SEQ_TO_SEQ = "SEQ_2_SEQ_LM"
"""peft's task type of an encoder–decoder with its language-model head."""

Init = Literal["vocabulary", "words", "random"]


class VirtualTokenTuner(Tuner):
    """A tuner whose part is one tensor `prompt_embeddings` after `Tuner.reparametrize`."""

    @property
    @override
    def virtual_tokens(self) -> int:
        return int(self.options.model_dump()["tokens"])

    @override
    def mixes_rows(self, backbone: Backbone) -> bool:
        """Return whether the family is known, so that the position of each row's text can be computed."""
        return backbone.known_architecture is not None

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        """Put the mix's vectors before the text."""
        blended = blend([self.reparametrize(part.tensors)[PROMPT_TENSOR] for part in mix], mix)
        if blended is not None:
            plan.prompts.append(Prompt(*blended))

    @override
    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Interpolate the vectors."""
        return MergedAdapter(weighted_sum(mix), self.options.model_dump(mode="json"))

    @override
    def peft_tensors(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> Tensors:
        """Repeat the prompt for an encoder–decoder: peft holds one for the decoder, and does not use it."""
        vectors = adapter.tensors[PROMPT_TENSOR]
        return {PROMPT_TENSOR: torch.cat([vectors] * 2) if task_type == SEQ_TO_SEQ else vectors}


def prompt_fields(vectors: Tensor, task_type: str) -> dict[str, Any]:
    """Fields of peft's configuration that all kinds of virtual tokens have; vectors of shape (tokens, width)."""
    submodules = 2 if task_type == SEQ_TO_SEQ else 1
    return {"num_virtual_tokens": len(vectors), "num_transformer_submodules": submodules}


def blend(vectors: Sequence[Tensor], mix: Sequence[WeightedTensors]) -> tuple[Tensor, Tensor | None] | None:
    """Compute the weighted sum of equally shaped vectors, and which rows have vectors.

    Args:
        vectors: one tensor per part, each of shape (…).
        mix: the parts' weights.

    Returns:
        A tensor of shape (rows or 1, …) and a mask of shape (rows,), or None for all rows; None if no row has vectors.
    """
    weight_sum: float | Tensor = 0.0
    result: Tensor | None = None
    for vector, part in zip(vectors, mix, strict=True):
        if isinstance(part.weight, Tensor):
            weight = part.weight.to(vector.device, vector.dtype)
            term, weight_sum = weight.reshape(-1, *([1] * vector.dim())) * vector, weight_sum + weight
        else:
            term = (vector if part.weight == 1 else part.weight * vector).unsqueeze(0)
            weight_sum = weight_sum + part.weight
        result = term if result is None else result + term
    assert result is not None, "an empty mix"
    if not isinstance(weight_sum, Tensor):
        return None if weight_sum == 0 else (result, None)
    present = weight_sum != 0
    if bool(present.all()):
        return result, None
    return (result, present) if bool(present.any()) else None


def initial_vectors(backbone: Backbone, tokens: int, init: Init, words: str, generator: torch.Generator) -> Tensor:
    """Make a prompt's initial vectors.

    Args:
        backbone: the backbone whose word embeddings are used.
        tokens: number of virtual tokens.
        init: `vocabulary`: rows of the word embeddings, drawn at random. `words`: the rows of a text's tokens, repeated
            in order. `random`: normal, with the standard deviation of the word embeddings. All are scaled as the model
            scales its embeddings.
        words: the text for `words`.
        generator: the generator of random initial values.

    Returns:
        Shape (tokens, width of the word embeddings), float32, on the CPU.
    """
    table, scale = backbone.word_embeddings.detach(), backbone.embedding_scale
    if init == "random":
        return torch.randn(tokens, table.shape[1], generator=generator) * table.float().std().cpu() * scale
    if init == "vocabulary" or backbone.shape_only:  # shapes alone have no tokenizer for words
        rows = torch.randint(len(table), (tokens,), generator=generator)
    else:
        ids = torch.tensor(_ids(backbone.tokenizer, words))
        rows = ids[torch.arange(tokens) % len(ids)]
    return table[rows.to(table.device)].float().cpu() * scale


def _ids(tokenizer: PreTrainedTokenizerBase, words: str) -> list[int]:
    ids = list(tokenizer(words, add_special_tokens=False)["input_ids"])
    if not ids:
        raise InputError("tuner.words: tuner.init=words needs a text, e.g. tuner.words='it was great'")
    return ids


def is_folded(tensors: Tensors) -> bool:
    """Return whether `Tuner.reparametrize` was applied to these tensors already."""
    return PROMPT_TENSOR in tensors
