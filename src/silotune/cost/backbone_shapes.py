"""Backbones as shapes: made from a configuration alone, without weights or tokenizer.

The tensors are PyTorch's fake tensors: shapes and types without storage (as on the meta device), on which all code of
the package runs unchanged, LLaMA-7B included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from silotune.cost.stub_heads import LANGUAGE_MODEL_HEADS
from silotune.errors import InputError, unknown
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import default_backbone, silence_transformers

PREFIX = "shape:"


@dataclass(frozen=True)
class Shape:
    """A backbone without weights.

    Args:
        backbone: over fake tensors; to be used under `mode`.
        mode: the fake tensors' mode.
        parameters: of the base transformer as checkpoints have it, its pooler included where the family has one.
        pooler: those of the pooler among them, which no head here reads.
        language_model: parameters of the whole language model (masked, encoder–decoder or causal), tied ones once.
    """

    backbone: Backbone
    mode: FakeTensorMode
    parameters: int
    pooler: int
    language_model: int

    def bare(self, head: str, head_parameters: int) -> int:
        """Parameters of the bare model with its head, which full fine-tuning trains.

        The papers' fine-tuned models are transformers' own classes. `linear` stands on the pooler where the family
        has one and `mlp` takes the pooler's place, so that on BERT and RoBERTa both are the sequence classifier;
        heads over the vocabulary are the language model.

        Args:
            head: the head's kind.
            head_parameters: of one head.
        """
        if head in LANGUAGE_MODEL_HEADS:
            return self.language_model
        return self.parameters + head_parameters - (self.pooler if head == "mlp" else 0)


def shape_names() -> list[str]:
    """The shapes that come with the package."""
    entries = (resources.files("silotune") / "shapes").iterdir()
    return sorted(PREFIX + entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json"))


@cache
def load_shape(name: str) -> Shape:
    """The shape behind a `backbone` value.

    Args:
        name: `shape:NAME`, the path of a `config.json` or of a folder with one, `default`, or a hub id (of which only
            the configuration is read).

    Raises:
        InputError: if there is no such configuration, or transformers does not know its model.
    """
    from transformers import AutoModel

    silence_transformers()
    config = _config(name)
    kind: Any = AutoModel  # its annotations do not hold under strict checking
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        try:
            model = kind.from_config(config, attn_implementation="eager")
        except Exception as error:
            raise _no_configuration(name, error) from error
        parameters, pooler = _count(model), _count(getattr(model, "pooler", None))
        # no tokenizer: nothing here reads text
        backbone = Backbone(model, cast(Any, None), precision="fp32", shape_only=True, name=name)
    return Shape(backbone, mode, parameters, pooler, _language_model(config))


def _config(name: str) -> Any:
    from transformers import AutoConfig

    path = Path(default_backbone() if name == "default" else name)
    if name.startswith(PREFIX):
        if name not in shape_names():
            raise unknown("backbone", name, shape_names())
        text = (resources.files("silotune") / "shapes" / f"{name.removeprefix(PREFIX)}.json").read_text("utf-8")
    elif path.is_dir() or path.suffix == ".json":
        path = path / "config.json" if path.is_dir() else path
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"backbone: cannot read {path} ({type(error).__name__})") from error
    else:
        try:
            return AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"backbone: no configuration of {name!r} ({reason}); allowed: {', '.join(shape_names())}, default, the "
                "path of a config.json, a local folder, a hub id"
            ) from error
    try:
        return AutoConfig.for_model(**json.loads(text))
    except Exception as error:
        raise _no_configuration(name, error) from error


def _no_configuration(name: str, error: Exception) -> InputError:
    """The library raises many kinds; all mean the same to a user."""
    reason = " ".join(str(error).split())[:160]
    return InputError(f"backbone: {name} is no configuration that transformers knows ({reason})")


def _language_model(config: Any) -> int:
    """Parameters of the language model of a configuration; 0 where transformers has none."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    kinds: tuple[Any, ...] = (AutoModelForMaskedLM, AutoModelForCausalLM)
    for kind in (AutoModelForSeq2SeqLM,) if config.is_encoder_decoder else kinds:
        try:
            with torch.device("meta"):
                return _count(kind.from_config(config))
        except ValueError:
            continue
    return 0


def _count(module: torch.nn.Module | None) -> int:
    """Parameters of a module, tied ones once."""
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
