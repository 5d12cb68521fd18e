"""Transformers' class for token classification around a base model, with a run's head as its last layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from silotune.core.tensors import Tensors

CLASS = "AutoModelForTokenClassification"


def token_classifier(base: Any, tags: Sequence[str], head: Tensors) -> tuple[Any, str] | None:
    """Return a model of transformers' class around a base model, which is not copied, and its last layer's name.

    None if the family has no such class, or one with more than a linear layer behind the base (ModernBERT).
    """
    import transformers

    config = copy.deepcopy(base.config)
    config.id2label, config.label2id = dict(enumerate(tags)), {tag: place for place, tag in enumerate(tags)}
    try:
        with torch.device("meta"):
            whole: Any = getattr(transformers, CLASS).from_config(config)
    except ValueError:
        return None
    layers = [
        name
        for name, module in whole.named_children()
        if name != whole.base_model_prefix and any(True for _ in module.parameters())
    ]
    if len(layers) != 1 or not isinstance(layer := getattr(whole, layers[0]), nn.Linear) or layer.bias is None:
        return None
    layer.weight, layer.bias = (nn.Parameter(head[f"out.{name}"], requires_grad=False) for name in ("weight", "bias"))
    setattr(whole, whole.base_model_prefix, base)
    return whole.eval(), layers[0]
