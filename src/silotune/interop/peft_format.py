"""Adapters in the Hugging Face PEFT layout: `adapter_config.json` and `adapter_model.safetensors`.

The names are peft's own (checked against it by tests); peft itself is not needed to write them.
"""

from __future__ import annotations

from typing import Any

import torch

from silotune.core.tensors import Tensors
from silotune.errors import InputError
from silotune.interop.merge_adapters import MergedAdapter
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.prompt_base import PROMPT
from silotune.models.tuners.target_modules import is_transposed

KINDS = {"lora": "LORA", "ia3": "IA3", "prompt": "PROMPT_TUNING", "p-tuning": "P_TUNING", "prefix": "PREFIX_TUNING"}
"""Our tuners → peft's types."""

TASKS = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForMaskedLM": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
}
"""The class a base model is loaded with → peft's task type."""


Layout = tuple[dict[str, Any], Tensors]
"""(configuration, tensors)."""


def peft_layout(backbone: Backbone, kind: str, adapter: MergedAdapter, base: str, base_class: str) -> Layout:
    """One adapter as peft saves it.

    Args:
        backbone: what it was trained on.
        kind: the tuner's name, of `KINDS`.
        adapter: its tensors and options.
        base: the base model's name.
        base_class: the class that base models are loaded with.

    Raises:
        InputError: where peft cannot express it.
    """
    common = {
        "peft_type": KINDS[kind],
        "task_type": TASKS[base_class],
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    if kind in ("lora", "ia3"):
        sites = list(dict.fromkeys(_module(name) for name in adapter.tensors))
        inside = "" if backbone.model.base_model is backbone.model else f"{backbone.model.base_model_prefix}."
        tensors = {f"base_model.model.{inside}{name}": tensor for name, tensor in adapter.tensors.items()}
        config = common | _weights_config(backbone, kind, adapter, sites)
        return config, tensors
    return _virtual(backbone, kind, adapter, common)


def _weights_config(backbone: Backbone, kind: str, adapter: MergedAdapter, sites: list[str]) -> dict[str, Any]:
    transposed = {is_transposed(backbone.site(site)) for site in sites}
    config: dict[str, Any] = {
        "target_modules": short_names(backbone, sites),
        "fan_in_fan_out": transposed == {True},
        "modules_to_save": None,
    }
    if kind == "lora":
        options = {"r": adapter.options["r"], "lora_alpha": _plain(adapter.options["alpha"]), "lora_dropout": 0.0}
        return config | options | {"bias": "none", "init_lora_weights": True}
    inputs = [_module(name) for name, tensor in adapter.tensors.items() if tensor.shape[0] == 1]
    short = short_names(backbone, inputs) if inputs else []
    if any(site.endswith(tuple(short)) != (site in inputs) for site in sites):  # peft compares ends, not words
        short = inputs
    return config | {"feedforward_modules": short, "init_ia3_weights": True}


def _virtual(backbone: Backbone, kind: str, adapter: MergedAdapter, common: dict[str, Any]) -> Layout:
    """Virtual tokens: one tensor `prompt_embeddings`."""
    vectors = adapter.tensors[PROMPT]
    several = common["task_type"] == "SEQ_2_SEQ_LM"
    config = common | {"num_virtual_tokens": len(vectors), "num_transformer_submodules": 2 if several else 1}
    if kind != "prefix":
        config["token_dim"] = vectors.shape[1]
        if kind == "p-tuning":  # the encoder is carried out; peft still builds one where it is to be trained on
            config |= {"encoder_reparameterization_type": "MLP", "encoder_hidden_size": vectors.shape[1]}
        else:
            config["prompt_tuning_init"] = "RANDOM"
        # peft holds a second prompt for the decoder, and does not use it
        return config, {PROMPT: torch.cat([vectors] * 2) if several else vectors}
    config |= {"prefix_projection": False, "encoder_hidden_size": None}
    if not backbone.architecture.more:
        return config, {PROMPT: vectors}
    if not several or adapter.options["stack"] != "decoder":
        raise InputError(
            "export: peft has no prefix in an encoder's attention; what it loads on "
            f"{backbone.model_type}: prompt, p-tuning, lora, ia3, and tuner.stack=decoder under a language-model head"
        )
    return _decoder_prefix(backbone, vectors, config)


def _decoder_prefix(backbone: Backbone, vectors: torch.Tensor, config: dict[str, Any]) -> Layout:
    """An encoder–decoder's decoder gets from peft, in layer i, what it holds for layer 2·i mod n."""
    layers = len(backbone.base.get_submodule(backbone.architecture.more[0].blocks))
    split = vectors.view(len(vectors), layers, -1)
    place = [2 * layer % layers for layer in range(layers)]
    there = torch.zeros_like(split)
    for layer, source in enumerate(place):
        there[:, source] = split[:, layer]
    if not torch.equal(there[:, place], split):
        raise InputError(
            f"export: peft gives a decoder of {layers} layers (an even number) only {layers // 2} different prefixes, "
            f"so that this one cannot be expressed; what it loads on {backbone.model_type}: prompt, p-tuning, lora, ia3"
        )
    heads = int(backbone.base.config.num_attention_heads)
    config |= {"num_layers": layers, "num_attention_heads": heads, "token_dim": split.shape[2] // 2}
    return config, {PROMPT: there.flatten(1)}


def short_names(backbone: Backbone, sites: list[str]) -> list[str]:
    """Module names as short as they still mean these modules alone: their last words where that is so."""
    everywhere = [name for name, _ in backbone.model.named_modules()] + ["pooler.dense"]
    endings = list(dict.fromkeys(site.rpartition(".")[2] for site in sites))
    meant = [name for name in everywhere if name.rpartition(".")[2] in endings]
    return endings if len(meant) == len(sites) else sites


def _module(name: str) -> str:
    return name.removesuffix(".ia3_l").partition(".lora_")[0]


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
