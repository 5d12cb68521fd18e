"""Tell from a model's files, or from a loaded backbone, what a head's defaults follow: its pooling and its template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silotune.config.backbone import BackboneConfig
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.packages import model_source
from silotune.models.backbone.stored_model import hub_options, is_causal

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
    found = [mode for key, mode in _MODES.items() if isinstance(noted, Mapping) and noted.get(key)]
    return found[0] if len(found) == 1 else "first"


def has_chat_template(settings: BackboneConfig, backbone: Backbone | None) -> bool:
    """Return whether a model's tokenizer has a chat template; arguments as of `pooling_of`."""
    if backbone is not None:
        return bool(getattr(backbone.tokenizer, "chat_template", None))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_source(settings.name), **hub_options(settings))
    return bool(getattr(tokenizer, "chat_template", None))
