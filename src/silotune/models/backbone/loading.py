"""Load a backbone from the hub, a folder or the offline default, and refuse one with missing weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from silotune.config.backbone import BackboneConfig
from silotune.errors import InputError
from silotune.models.backbone.backbone import WEIGHT_TYPES, Backbone
from silotune.models.backbone.block_devices import BlockDevices, candidates, plan_blocks, release, require_accelerate
from silotune.models.backbone.device import GIB, free_memory, keep_freed_memory, resolve_device, resolve_precision
from silotune.models.backbone.fingerprint import read_header, stored_fingerprint
from silotune.models.backbone.packages import model_source
from silotune.models.backbone.quantization import NONE, quantized_loading, resolve_quantization, settle, weight_bytes
from silotune.models.backbone.stored_model import (
    DESCRIPTIONS,
    ModelClass,
    hub_options,
    model_class_of,
    one_message,
    weight_files,
    without_data,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # they warn of GPU kernels when they are imported
    logging.getLogger(_name).setLevel(logging.ERROR)


def silence_transformers() -> None:
    """Turn off transformers' log messages and progress bars; silotune reports errors itself."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def transformers_messages_kept() -> Iterator[None]:
    """Restore, after the block, the messages that `silence_transformers` turns off."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_backbone(
    backbone: str | BackboneConfig,
    *,
    precision: str = "auto",
    device: str = "auto",
    keep_master: bool = False,
    checkpointing: bool = False,
    model_class: ModelClass = "AutoModel",
    on_use: bool = False,
) -> Backbone:
    """Load a backbone: `default` (offline MiniLM), a hub id or a local folder.

    Other options are those of `Backbone`. The precision is also the type of the weights, unless master weights are
    kept; the class is the one that the head needs, and an encoder–decoder serves as either kind of language model.
    """
    settings = BackboneConfig(name=backbone) if isinstance(backbone, str) else backbone
    target = resolve_device(device)
    precision = resolve_precision(precision, target)
    dtype = torch.float32 if keep_master else WEIGHT_TYPES.get(precision, torch.float32)
    keep_freed_memory()
    silence_transformers()
    import_module("transformers.modeling_utils")
    from transformers import AutoTokenizer

    source = model_source(settings.name)
    quantization = resolve_quantization(settings.quantization, target)
    options: dict[str, Any] = {
        **hub_options(settings),
        "dtype": dtype,  # in files of the same type weights stay, mapped into memory, where the device is a CPU
        "use_safetensors": True,  # nothing is unpickled
        "attn_implementation": _attention(settings.attention, dtype, target),
    }
    if quantization != NONE:
        options |= quantized_loading(quantization, dtype, target)
    possible = [target] if settings.device_map is None else candidates(target)
    with one_message(settings.name):
        config, auto, more = model_class_of(settings, source, model_class)
        options |= more
        tokenizer = AutoTokenizer.from_pretrained(source, config=config, **hub_options(settings))
        files = weight_files(source, settings)
    for path in files:  # a pointer of git LFS, or an unfinished download, has no header
        with path.open("rb") as file:
            read_header(file)
    shapes = partial(without_data, settings, source, model_class)
    if quantization == NONE:
        _require_room(settings.name, shapes, files, dtype, possible)
    block_devices = None
    if len(possible) > 1:
        require_accelerate()
        model_shapes = shapes()
        block_devices = plan_blocks(model_shapes, possible, dtype, quantization)
        options["device_map"] = block_devices.for_loading(model_shapes)
    model = _read(settings.name, source, model_class, config, auto, options)
    if block_devices is not None:
        release(model)
    if quantization != NONE:
        settle(model, settings.name, quantization)
    files = files or weight_files(source, settings)  # they may have been fetched now
    loaded = Backbone(
        model,
        tokenizer,
        settings=settings.model_copy(update={"quantization": quantization}),
        precision=precision,
        devices=block_devices or BlockDevices(target),
        keep_master=keep_master,
        checkpointing=checkpointing,
        fingerprint=stored_fingerprint(files) if files else None,
        on_use=on_use,
    )
    _check_tokenizer(loaded)
    _check_lm_head(loaded)
    return loaded


def _require_room(
    name: str, shapes: Callable[[], Any], files: Sequence[Path], dtype: torch.dtype, devices: Sequence[torch.device]
) -> None:
    """Refuse weights that are larger than the free memory: without it, the system ends the process without a word."""
    free = sum(map(free_memory, devices))
    if sum(file.stat().st_size for file in files) * 4 <= free:  # no type is stored smaller than a byte a number
        return
    needed = weight_bytes(shapes(), NONE, dtype.itemsize)
    if needed > free:
        raise InputError(
            f"backbone: the weights of {name!r} take {needed / GIB:.1f} GiB, and {' and '.join(map(str, devices))} "
            f"{'has' if len(devices) == 1 else 'have'} {free / GIB:.1f} GiB free; precision=bf16, "
            "backbone.quantization and a smaller backbone need less"
        )


def stored_types(files: Sequence[Path]) -> set[torch.dtype | None]:
    """Return the types of the numbers in safetensors files; None for one that backbones do not compute in."""
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    types = set()
    for path in files:
        with path.open("rb") as file:
            tensors = [tensor for name, tensor in read_header(file).items() if name != "__metadata__"]
        types |= {names.get(tensor["dtype"]) for tensor in tensors if "F" in tensor["dtype"]}
    return types


def _check_tokenizer(backbone: Backbone) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding of."""
    tokens = max(len(backbone.tokenizer), 1 + max(backbone.tokenizer.get_vocab().values()))  # ids may have gaps
    rows = len(backbone.word_embeddings)
    if tokens > rows:
        raise InputError(
            f"backbone: the tokenizer of {backbone.name!r} has {tokens} tokens and its model {rows} word embeddings; "
            "give the tokenizer that belongs to the model, or a model with an embedding of every token"
        )


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
    name: str, source: str, model_class: ModelClass, config: Any, auto: Any, options: dict[str, Any]
) -> PreTrainedModel:
    """Read a model's weights from its files; refuses files that do not have all of them."""
    with one_message(name):
        model, loading_info = auto.from_pretrained(source, config=config, output_loading_info=True, **options)
    # a pooler may be missing: no head reads it
    missing = sorted(key for key in loading_info["missing_keys"] if not key.startswith("pooler."))
    if missing and model_class != "AutoModel":
        description = DESCRIPTIONS[model_class]
        raise InputError(f"backbone: the head needs {description}; {name!r} was saved without {missing[0]!r}")
    if missing:
        raise InputError(f"backbone: {name!r} has no weights for {missing[0]!r}; they would be random")
    return cast("PreTrainedModel", model)


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

    if device.type != "cuda" or dtype is torch.float32 or not is_flash_attn_2_available():
        raise InputError(
            "backbone.attention=flash: needs a GPU with precision=bf16 or fp16, and the package flash-attn; allowed: "
            "auto, eager, sdpa"
        )
    return "flash_attention_2"
