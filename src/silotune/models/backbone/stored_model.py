"""Find a stored model's files, class, shapes, pooling and chat template without loading its weights.

`hub_options` are the arguments of every `from_pretrained`, and `one_message` turns its many errors into one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, cast

import torch

from silotune.config.backbone import BackboneConfig
from silotune.errors import InputError, library_errors
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.packages import PACKAGED, model_source
from silotune.models.backbone.quantization import refuse_stored_quantization

ModelClass = Literal["AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM"]
"""The transformers class a head needs: the transformer alone, or with its language-model head."""

DESCRIPTIONS: dict[str, str] = {
    "AutoModel": "a transformer",
    "AutoModelForMaskedLM": "a language model (masked, causal or encoder–decoder) with its language-model head",
    "AutoModelForCausalLM": "a causal language model or an encoder–decoder, with its language-model head",
}


def hub_options(settings: BackboneConfig) -> dict[str, Any]:
    """Return the keyword arguments of every `from_pretrained` (configuration, tokenizer, weights)."""
    if settings.revision is None:
        return {}
    if settings.name in PACKAGED or Path(settings.name).exists():
        raise InputError(f"backbone.revision: belongs to an id of the hub, and backbone={settings.name} is none")
    return {"revision": settings.revision}


def is_causal(config: Any) -> bool:
    """Return whether a token sees only those before it, by a configuration of transformers."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    if config.is_encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return False
    return kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or bool(getattr(config, "is_decoder", False))


def one_message(name: str) -> AbstractContextManager[None]:
    """Turn the many types of error that transformers raises into one for the user, which names what needs no hub."""
    allowed = f"; allowed: {', '.join(PACKAGED)}, a hub id, a local folder, a GGUF file"
    return library_errors(f"backbone: cannot load {name!r}", allowed)


TEXT_PART = {
    "key_mapping": {
        r"^(?:model\.)?language_model\.lm_head": "lm_head",
        r"^(?:model\.)?language_model\.model\.": "model.",
        r"^(?:model\.)?language_model\.": "model.",
    }
}
"""Argument of `from_pretrained` by which the text part of a model of several modalities finds its weights."""


def text_part(config: Any) -> Any:
    """Return the configuration of the text part of a model of several modalities; of others, the given one."""
    several = getattr(config, "hidden_size", None) is None and "text_config" in getattr(config, "sub_configs", {})
    return config.get_text_config() if several else config


def model_class_of(settings: BackboneConfig, source: str, model_class: ModelClass) -> tuple[Any, Any, dict[str, Any]]:
    """Return a stored model's configuration, the auto class of transformers for it, and arguments for reading it.

    Of a model of several modalities, the configuration is its text part's and has the whole's type as `text_part_of`.
    """
    import transformers

    name = settings.name
    stored = transformers.AutoConfig.from_pretrained(source, **hub_options(settings))
    config = text_part(stored)
    refuse_stored_quantization(name, config)
    if model_class != "AutoModel" and config.is_encoder_decoder:
        auto: Any = transformers.AutoModelForSeq2SeqLM
    elif model_class == "AutoModelForMaskedLM" and is_causal(config):
        auto = transformers.AutoModelForCausalLM
    else:
        auto = getattr(transformers, model_class)
    if getattr(config, "hidden_size", None) is None:
        raise InputError(
            f"backbone: {name!r} is of type {config.model_type!r}, which is no language model and has none as its text "
            "part; save its language model by itself, and give that folder"
        )
    if type(config) not in auto._model_mapping:
        needed = DESCRIPTIONS[model_class]
        raise InputError(f"backbone: the head needs {needed}; {name!r} is of type {config.model_type!r}")
    if config is stored:
        return config, auto, {}
    config.text_part_of = stored.model_type
    return config, auto, TEXT_PART


def without_data(settings: BackboneConfig, source: str, model_class: ModelClass) -> Any:
    """Make a stored model with its shapes alone; arguments as of `model_class_of`."""
    with one_message(settings.name), torch.device("meta"):
        config, auto, _ = model_class_of(settings, source, model_class)
        return auto.from_config(config)


def weight_files(source: str, settings: BackboneConfig | None = None) -> list[Path]:
    """Return the safetensors files of a model's weights; empty where they have other names than transformers gives.

    The model is on this machine already: in a folder, or under a hub id, in the revision of the settings.
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


_POOLING_FILE = "1_Pooling/config.json"
"""Where sentence-transformers says how it pools."""

_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
}
"""Key of that file → `head.pooling`."""

_MEAN = ("default", "mpnet")
"""Backbones of sentence-transformers whose packages leave that file out."""


def pooling_of(settings: BackboneConfig, backbone: Backbone | None) -> str:
    """Return the value of `head.pooling` that suits a model.

    It is `last` in a causal model, whose other states have not seen the whole text; else what the model was trained
    with, as sentence-transformers notes it; else `first`.
    """
    name = settings.name if backbone is None else backbone.name
    if name in _MEAN:
        return "mean"
    if backbone is None:
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(model_source(settings.name), **hub_options(settings))
    else:
        config = backbone.base.config
    return "last" if is_causal(config) else _noted_pooling(name)


def _noted_pooling(name: str) -> str:
    from transformers.utils.hub import cached_file

    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        file = cached_file(name, _POOLING_FILE, **options)
        noted = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return "first"
    modes = [mode for key, mode in _MODES.items() if isinstance(noted, Mapping) and noted.get(key)]
    return modes[0] if len(modes) == 1 else "first"


def has_chat_template(settings: BackboneConfig, backbone: Backbone | None) -> bool:
    """Return whether a model's tokenizer has a chat template; arguments as of `pooling_of`."""
    if backbone is not None:
        return bool(getattr(backbone.tokenizer, "chat_template", None))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_source(settings.name), **hub_options(settings))
    return bool(getattr(tokenizer, "chat_template", None))
