"""`fold_in` adds an adapter to plain weights, so that transformers loads the model alone; `load_plain`."""

from __future__ import annotations

from typing import Any

import torch

from silotune.config import BackboneConfig
from silotune.errors import InputError
from silotune.models.backbone.stored_model import default_backbone, hub_options
from silotune.models.tuners import Tuner
from silotune.models.tuners.base import MergedAdapter
from silotune.models.tuners.target_modules import is_transposed


def load_plain(backbone: BackboneConfig, base_class: str, float32: bool = True) -> Any:
    """Load the whole backbone (poolers too) with transformers, not quantized.

    Args:
        backbone: the section `backbone`.
        base_class: the class of transformers.
        float32: whether the weights are float32; if not, they have the types in which they are stored.
    """
    import transformers

    source = default_backbone() if backbone.name == "default" else backbone.name
    try:
        model, report = getattr(transformers, base_class).from_pretrained(
            source,
            dtype=torch.float32 if float32 else "auto",
            use_safetensors=True,  # nothing is unpickled
            output_loading_info=True,
            **hub_options(backbone),
        )
    except (OSError, ValueError) as error:
        raise InputError(f"backbone: cannot load {backbone.name!r} ({str(error).strip().splitlines()[0]})") from error
    if any(key.startswith("pooler.") for key in report["missing_keys"]):
        model.base_model.pooler = None  # the checkpoint has none, transformers would draw a random one
    return model.eval()


def can_fold(tuner: Tuner | type[Tuner]) -> bool:
    """Whether adapters of this tuner can be folded into weights and biases."""
    return tuner.trains_backbone or tuner.implements("weight_delta")


@torch.no_grad()
def fold_in(model: Any, tuner: Tuner, adapter: MergedAdapter) -> None:
    """Change the model's weights in place so that it computes what it computed with the adapter.

    Args:
        model: the plain backbone.
        tuner: the adapter's tuner, for which `can_fold` holds.
        adapter: the adapter's tensors and options.
    """
    base = model.base_model
    if tuner.trains_backbone:
        weights = dict(base.named_parameters())
        for name, tensor in adapter.tensors.items():
            weights[name].copy_(tensor)
        return
    for name in tuner.target_modules(adapter.tensors):
        module = base.get_submodule(name)
        for parameter, delta in tuner.weight_delta(adapter, name, module).items():
            weight = getattr(module, parameter)
            stored = delta.t() if parameter == "weight" and is_transposed(module) else delta
            weight.copy_(weight.double() + stored)
