"""Prompt tuning: trained vectors before the text's word embeddings (Lester et al. 2021; FedPrompt, section 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from pydantic import Field
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.base import MergedAdapter, TunerOptions
from silotune.models.tuners.prompt_base import (
    PROMPT_TENSOR,
    Init,
    VirtualTokenTuner,
    initial_vectors,
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
