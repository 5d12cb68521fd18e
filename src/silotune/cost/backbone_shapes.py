"""Make a backbone of fake tensors (shapes without data) from a configuration, without weights, and heads over it.

Their tensors are PyTorch's fake tensors, which have shapes and types but no storage (as on the meta device). All code
of the package runs on them unchanged, for LLaMA-7B too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from silotune.config.backbone import BackboneConfig
from silotune.core.tensors import Tensors
from silotune.errors import library_errors, require_known
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import silence_transformers
from silotune.models.backbone.packages import model_source
from silotune.models.forward.views import View
from silotune.models.heads import Head

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig
    from silotune.data.tasks import Task

PREFIX = "shape:"

_UNKNOWN = "backbone: {} is no configuration that transformers knows"

LANGUAGE_MODEL_HEADS = ("verbalizer", "lm")
"""Heads that use the pretrained model's own frozen output layer; they add no parameters."""

STATES = "states"
"""Name of the view entry with all states, shape (rows, tokens, hidden)."""


def all_states(last_layer: Tensor, _: object) -> Tensor:
    """Return the last layer's states unpooled (the pooling `STATES`)."""
    return last_layer


@dataclass(frozen=True)
class Shape:
    """A backbone without weights, over fake tensors; it is used under `mode`.

    `parameters` counts the base transformer as in checkpoints, with the `pooler` of families that have one, which no
    head here reads; `language_model` the whole language model, tied ones once, 0 without one.
    """

    backbone: Backbone
    mode: FakeTensorMode
    parameters: int
    pooler: int
    language_model: int

    def bare(self, head: str, head_parameters: int) -> int:
        """Count the parameters of the bare model with its head, which full fine-tuning trains.

        The papers' fine-tuned models are classes of transformers. A `linear` head reads the pooler where the family has
        one, and an `mlp` head replaces the pooler, so that both are the sequence classifier on BERT and RoBERTa. Heads
        over the vocabulary are the language model.
        """
        if head in LANGUAGE_MODEL_HEADS:
            return self.language_model
        return self.parameters + head_parameters - (self.pooler if head == "mlp" else 0)


def shape_names() -> list[str]:
    """List the values of `backbone` for shapes that the package has."""
    entries = (resources.files("silotune") / "shapes").iterdir()
    return sorted(PREFIX + entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json"))


@cache
def load_shape(name: str) -> Shape:
    """Make the shape of a `backbone` value: `shape:NAME`, a `config.json` or a folder with one, `default`, a hub id.

    The configuration alone is read.
    """
    from transformers import AutoModel

    silence_transformers()
    config = read_shape_config(name)
    auto_class: Any = AutoModel  # its annotations do not hold under strict checking
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        with library_errors(_UNKNOWN.format(name)):
            model = auto_class.from_config(config, attn_implementation="eager")
        parameters, pooler = _count(model), _count(getattr(model, "pooler", None))
        # no tokenizer: shapes are never given text
        backbone = Backbone(model, cast(Any, None), settings=BackboneConfig(name=name))
    return Shape(backbone, mode, parameters, pooler, _language_model(config))


def read_shape_config(name: str) -> Any:
    """Read transformers' configuration of a `backbone` value; see `load_shape`."""
    from transformers import AutoConfig

    path = Path(name if name.startswith(PREFIX) else model_source(name))
    if name.startswith(PREFIX):
        require_known("backbone", name, shape_names())
        text = (resources.files("silotune") / "shapes" / f"{name.removeprefix(PREFIX)}.json").read_text("utf-8")
    elif path.is_dir() or path.suffix == ".json":
        path = path / "config.json" if path.is_dir() else path
        with library_errors(f"backbone: cannot read {path}"):
            text = path.read_text("utf-8")
    else:
        allowed = f"; allowed: {', '.join(shape_names())}, default, the path of a config.json, a local folder, a hub id"
        with library_errors(f"backbone: no configuration of {name!r}", allowed):
            return AutoConfig.from_pretrained(name)
    with library_errors(_UNKNOWN.format(name)):
        return AutoConfig.for_model(**json.loads(text))


def _language_model(config: Any) -> int:
    """Count the parameters of a configuration's language model; 0 where transformers has none."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    auto_classes: tuple[Any, ...] = (AutoModelForMaskedLM, AutoModelForCausalLM)
    for auto_class in (AutoModelForSeq2SeqLM,) if config.is_encoder_decoder else auto_classes:
        try:
            with torch.device("meta"):
                return _count(auto_class.from_config(config))
        except ValueError:
            continue
    return 0


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


class VocabularyHeadStub(Head):
    """A head without tensors that costs as much as the configured head.

    In place of `verbalizer` it scores one word per label at one position, in place of `lm` all words at all positions.
    Its cost is that of the projection to words; the layers that some families have before the projection are left out.
    """

    name = "vocabulary-stub"

    def __init__(self, backbone: Backbone, replaced: str) -> None:
        self.replaced = replaced
        self._words = backbone.word_embeddings

    @classmethod
    def make(cls, config: HeadConfig) -> Self:
        """Refuse: no configuration can name this head."""
        raise NotImplementedError

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        return {}

    @override
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Compute logits; for `lm` their mean over positions, which costs as much as a loss at each position."""
        if self.replaced == "verbalizer":
            return nn.functional.linear(view["first"], self._words[: len(task.labels)])
        return nn.functional.linear(view[STATES], self._words).mean(1)
