"""Soft prompts: trained vectors (Lester et al. 2021), or those of a small network (P-tuning, Liu et al. 2021)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors, draw_linear, uniform
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.virtual_tokens import Prompt
from silotune.models.tuners.base import MergedAdapter, Tuner, TunerOptions, WeightedTensors, weighted_sum

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
    table = backbone.word_embeddings.detach()
    scale = float(getattr(backbone.base.get_input_embeddings(), "scalar_embed_scale", 1.0))  # Gemma's: √width
    if init == "random":
        return torch.randn(tokens, table.shape[1], generator=generator) * table.float().std().cpu() * scale
    if init == "vocabulary" or backbone.shape_only:  # shapes alone have no tokenizer for words
        rows = torch.randint(len(table), (tokens,), generator=generator)
    else:
        ids = torch.tensor(backbone.tokenizer(words, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        if not len(ids):
            raise InputError("tuner.words: tuner.init=words needs a text, e.g. tuner.words='it was great'")
        rows = ids[torch.arange(tokens) % len(ids)]
    return table[rows.to(table.device)].float().cpu() * scale


def is_folded(tensors: Tensors) -> bool:
    """Return whether `Tuner.reparametrize` was applied to these tensors already."""
    return PROMPT_TENSOR in tensors


class PromptOptions(TunerOptions):
    """The options of prompt tuning."""

    tokens: int = Field(default=20, ge=1, description="number of virtual tokens")
    init: Init = Field(default="vocabulary", description="source of the initial vectors")
    words: str = Field(default="", description="the text for `init=words`")


class PromptTuning(VirtualTokenTuner):
    """One tensor, named and shaped as in peft: `prompt_embeddings` (tokens, width of the word embeddings).

    In an encoder–decoder the prompt is before the encoder's text. `prompt_base` describes mixes.
    """

    name = "prompt"
    soft_prompt = True
    Options = PromptOptions
    example = {"tokens": 3}

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        options = cast(PromptOptions, self.options)
        return {PROMPT_TENSOR: initial_vectors(backbone, options.tokens, options.init, options.words, generator)}

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        vectors = adapter.tensors[PROMPT_TENSOR]
        more = {"token_dim": vectors.shape[1], "prompt_tuning_init": "RANDOM"}
        return {"peft_type": "PROMPT_TUNING"} | prompt_fields(vectors, task_type) | more


class PTuningOptions(TunerOptions):
    """The options of p-tuning."""

    tokens: int = Field(default=20, ge=1, description="number of virtual tokens")
    encoder: Literal["lstm", "mlp"] = Field(
        default="lstm", description="`lstm` (bidirectional, then an MLP) or `mlp` (three layers)"
    )
    width: int | None = Field(
        default=None, ge=1, description="hidden width of the encoder (None: that of the word embeddings)"
    )
    layers: int = Field(default=2, ge=1, description="layers of the LSTM")
    offset: bool = Field(
        default=True,
        description="add trained vectors to the encoder's output (FedPrompt's 25.420 M parameters in Table 5 include "
        "them)",
    )
    init: Init = Field(default="vocabulary", description="source of the encoder's initial input")
    words: str = Field(default="", description="the text for `init=words`")


class PTuning(VirtualTokenTuner):
    """Computes the prompt as `encoder(embedding) + offset`; mixes interpolate prompts, not encoders.

    Tensors, named as in peft: `embedding.weight` (tokens, d) with d the width of the word embeddings, `lstm_head.*`,
    `mlp_head.*`, and `offset.weight` (tokens, d), which starts at zero. The MLP behind the LSTM is 2h → d → d, as in
    the authors' code (peft's is 2h → 2h → d); without LSTM it is d → h → h → d. peft loads the computed prompt, one
    `prompt_embeddings` (tokens, d).
    """

    name = "p-tuning"
    soft_prompt = True
    Options = PTuningOptions
    example = {"tokens": 3, "width": 6}

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Draw the encoder as PyTorch does."""
        options = self._options
        start = initial_vectors(backbone, options.tokens, options.init, options.words, generator)
        d = start.shape[1]
        h = options.width or d
        tensors: Tensors = {"embedding.weight": start}
        if options.offset:
            tensors["offset.weight"] = torch.zeros_like(start)
        if options.encoder == "lstm":
            for name, shape in _lstm_shapes(d, h, options.layers).items():
                tensors[name] = uniform(generator, 1 / math.sqrt(h), *shape)
            sizes = [2 * h, d, d]
        else:
            sizes = [d, h, h, d]
        for number, (columns, rows) in enumerate(itertools.pairwise(sizes)):
            tensors |= draw_linear(f"mlp_head.{2 * number}", rows, columns, generator)
        return tensors

    @override
    def reparametrize(self, tensors: Tensors) -> Tensors:
        """Run the encoder."""
        if is_folded(tensors):
            return tensors
        x = tensors["embedding.weight"]
        if self._options.encoder == "lstm":
            x = _lstm(x, tensors, self._options.layers)
        last = max(int(name.split(".")[1]) for name in tensors if name.startswith("mlp_head."))
        for number in range(0, last + 1, 2):
            x = nn.functional.linear(x, tensors[f"mlp_head.{number}.weight"], tensors[f"mlp_head.{number}.bias"])
            if number < last:
                x = torch.relu(x)
        return {PROMPT_TENSOR: x + tensors["offset.weight"] if self._options.offset else x}

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        """Describe a plain prompt: the encoder is already applied, and peft needs it only for further training."""
        vectors = adapter.tensors[PROMPT_TENSOR]
        width = vectors.shape[1]
        encoder = {"token_dim": width, "encoder_reparameterization_type": "MLP", "encoder_hidden_size": width}
        return {"peft_type": "P_TUNING"} | prompt_fields(vectors, task_type) | encoder

    @property
    def _options(self) -> PTuningOptions:
        return cast(PTuningOptions, self.options)


def _lstm_shapes(inputs: int, h: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a bidirectional LSTM's tensors, in the order of `torch.lstm`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        columns = inputs if layer == 0 else 2 * h
        for side in ("", "_reverse"):
            shapes[f"lstm_head.weight_ih_l{layer}{side}"] = (4 * h, columns)
            shapes[f"lstm_head.weight_hh_l{layer}{side}"] = (4 * h, h)
            shapes[f"lstm_head.bias_ih_l{layer}{side}"] = (4 * h,)
            shapes[f"lstm_head.bias_hh_l{layer}{side}"] = (4 * h,)
    return shapes


def _lstm(x: Tensor, tensors: Tensors, layers: int) -> Tensor:
    """Run the bidirectional LSTM over the tokens from zero states: (tokens, d) → (tokens, 2h)."""
    h = tensors["lstm_head.weight_hh_l0"].shape[1]
    weights = [tensors[name] for name in _lstm_shapes(x.shape[1], h, layers)]
    zero = x.new_zeros(2 * layers, 1, h)
    # train=True always: cuDNN has no gradient otherwise, and without dropout the result is the same
    output, _, _ = torch.lstm(x.unsqueeze(0), (zero, zero), weights, True, layers, 0.0, True, True, True)
    return output.squeeze(0)
