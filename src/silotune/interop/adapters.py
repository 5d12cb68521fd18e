"""Lay an exported adapter out as peft does or as runs write a silo's model, or fold it into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from silotune.config import BackboneConfig
from silotune.core.tensors import Tensors, flatten
from silotune.errors import library_errors
from silotune.interop.token_classifier import CLASS
from silotune.methods.parts import HEAD, Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.packages import model_source
from silotune.models.backbone.stored_model import TEXT_PART, hub_options, text_part
from silotune.models.tuners import Tuner
from silotune.models.tuners.base import MergedAdapter
from silotune.models.tuners.target_modules import experts_are_transposed, is_transposed
from silotune.runs.model_file import MODEL_FILE, OWN_FILE, SHARED_ALONE
from silotune.runs.personal_model import PersonalModel

ADAPTER = "adapter"
"""The part of a model's folder that holds an exported adapter."""

TASK_TYPES = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForMaskedLM": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    CLASS: "TOKEN_CLS",
}
"""Class of transformers that loads the base model → peft's task type."""


class Layout(NamedTuple):
    """Content and file names of one adapter in an export."""

    config: dict[str, Any]
    tensors: Tensors
    name: str
    config_file: str
    tensor_file: str


def peft_layout(backbone: Backbone, tuner: Tuner, adapter: MergedAdapter, base: str, base_class: str) -> Layout | None:
    """Lay out one adapter as peft saves it; None if peft has no such tuner."""
    task_type = TASK_TYPES[base_class]
    config = tuner.peft_config(backbone, adapter, task_type)
    if config is None:
        return None
    common = {
        "peft_type": config["peft_type"],
        "task_type": task_type,
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    tensors = tuner.peft_tensors(backbone, adapter, task_type)
    return Layout(common | config, tensors, "peft", "adapter_config.json", "adapter_model.safetensors")


def with_last_layer(layout: Layout, inside: str, layer: str, head: Tensors) -> Layout:
    """Return peft's layout for a model whose base is its module `inside`, with the head as its saved last `layer`."""
    prefix = "base_model.model."
    tensors = {
        f"{prefix}{inside}.{rest}" if (rest := name.removeprefix(prefix)) != name else name: tensor
        for name, tensor in layout.tensors.items()
    }
    tensors |= {f"{prefix}{layer}.{name.removeprefix('out.')}": tensor for name, tensor in head.items()}
    return layout._replace(config=layout.config | {"modules_to_save": [layer]}, tensors=tensors)


def native_layout(
    model: PersonalModel, adapter: MergedAdapter, head: Tensors, private: Sequence[str], base: str, base_class: str
) -> Layout | None:
    """Lay out one adapter as runs write a silo's model (`models/NAME`): it is the only part beside the head.

    None if the tuner has no such layout. Modules are named inside the base transformer (`model.base_model`).
    """
    own_fields = model.tuner.native_config(adapter)
    if own_fields is None:
        return None
    scope = str(Scope.PRIVATE if private else Scope.SHARED)
    described: dict[str, Any] = {
        **model.about,
        "notice": f"Personal data of the silo: made of {', '.join(private)}." if private else SHARED_ALONE,
        "tuner": {"name": model.tuner.name, "options": adapter.options},
        "parts": {ADAPTER: {"scope": scope, "module": "tuner"}, HEAD: {"scope": scope, "module": "head"}},
        "mix": {ADAPTER: 1.0},
        "answers_with": HEAD,
        "weighting": None,
        "adapter": {
            "base_model": base,
            "base_class": base_class,
            "modules": model.tuner.target_modules(adapter.tensors),
            **own_fields,
        },
    }
    of_task = {f"{model.task.name}.{name}": tensor for name, tensor in head.items()}
    tensors = flatten({ADAPTER: adapter.tensors, HEAD: of_task})
    return Layout(described, tensors, "silotune", MODEL_FILE, OWN_FILE)


def load_plain(backbone: BackboneConfig, base_class: str, float32: bool = True) -> Any:
    """Load the whole backbone (poolers too) with transformers, in float32 or the types that are stored."""
    import transformers

    source = model_source(backbone.name)
    with library_errors(f"backbone: cannot load {backbone.name!r}"):
        stored = transformers.AutoConfig.from_pretrained(source, **hub_options(backbone))
        is_part = text_part(stored) is not stored
        model, report = getattr(transformers, base_class).from_pretrained(
            source,
            **({"config": text_part(stored), **TEXT_PART} if is_part else {}),
            dtype=torch.float32 if float32 else "auto",
            use_safetensors=True,  # nothing is unpickled
            output_loading_info=True,
            **hub_options(backbone),
        )
    if any(key.startswith("pooler.") for key in report["missing_keys"]):
        model.base_model.pooler = None  # the checkpoint has none, transformers would draw a random one
    if is_part:
        model._weight_conversions = None  # it is saved as a model of its own
    return model.eval()


def can_fold(tuner: Tuner | type[Tuner]) -> bool:
    """Whether adapters of this tuner can be folded into weights and biases."""
    return tuner.trains_backbone or tuner.implements("weight_delta")


@torch.no_grad()
def fold_in(model: Any, tuner: Tuner, adapter: MergedAdapter) -> None:
    """Merge an adapter of a tuner for which `can_fold` holds into the model's weights, in place."""
    base = model.base_model
    parameters = dict(base.named_parameters())
    if tuner.trains_backbone:
        for name, tensor in adapter.tensors.items():
            parameters[name].copy_(tensor)
        return
    for name in tuner.target_modules(adapter.tensors):
        if name in parameters:  # of experts
            (delta,) = tuner.weight_delta(adapter, name, base).values()
            stored = delta.mT if experts_are_transposed(base, name) else delta
            parameters[name].copy_(parameters[name].double() + stored)
            continue
        module = base.get_submodule(name)
        for parameter, delta in tuner.weight_delta(adapter, name, module).items():
            weight = getattr(module, parameter)
            stored = delta.t() if parameter == "weight" and is_transposed(module) else delta
            weight.copy_(weight.double() + stored)
