"""Soft prompts: trained vectors (Lester et al. 2021), or those of a small network (P-tuning, Liu et al. 2021)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors, draw_linear, uniform
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.base import MergedAdapter, TunerOptions
from silotune.models.tuners.prompt_base import (
    PROMPT_TENSOR,
    Init,
    VirtualTokenTuner,
    initial_vectors,
    is_folded,
    prompt_fields,
)


class PromptOptions(TunerOptions):
    """The options of prompt tuning."""

    tokens: int = Field(20, ge=1, description="number of virtual tokens")
    init: Init = Field("vocabulary", description="source of the initial vectors")
    words: str = Field("", description="the text for `init=words`")


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

    tokens: int = Field(20, ge=1, description="number of virtual tokens")
    encoder: Literal["lstm", "mlp"] = Field(
        "lstm", description="`lstm` (bidirectional, then an MLP) or `mlp` (three layers)"
    )
    width: int | None = Field(None, ge=1, description="hidden width of the encoder (None: that of the word embeddings)")
    layers: int = Field(2, ge=1, description="layers of the LSTM")
    offset: bool = Field(
        True,
        description="add trained vectors to the encoder's output (FedPrompt's 25.420 M parameters in Table 5 include "
        "them)",
    )
    init: Init = Field("vocabulary", description="source of the encoder's initial input")
    words: str = Field("", description="the text for `init=words`")


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
