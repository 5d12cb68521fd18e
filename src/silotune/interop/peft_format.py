"""`peft_layout`: an adapter as peft saves it, without importing peft; `Layout`, for both formats."""

from __future__ import annotations

from typing import Any, NamedTuple

from silotune.core.tensors import Tensors
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import Tuner
from silotune.models.tuners.base import MergedAdapter

TASK_TYPES = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForMaskedLM": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
}
"""Class of transformers that loads the base model → peft's task type."""


class Layout(NamedTuple):
    """Content and file names (without endings) of one adapter in an export."""

    config: dict[str, Any]
    tensors: Tensors
    name: str
    config_file: str
    tensor_file: str


def peft_layout(backbone: Backbone, tuner: Tuner, adapter: MergedAdapter, base: str, base_class: str) -> Layout | None:
    """Lay out one adapter as peft saves it.

    Args:
        backbone: the backbone on which the adapter was trained.
        tuner: the adapter's tuner.
        adapter: the adapter's tensors and options.
        base: the base model's name.
        base_class: the class of transformers that loads the base model.

    Returns:
        None if peft has no such tuner.
    """
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
    return Layout(common | config, tensors, "peft", "adapter_config", "adapter_model")
