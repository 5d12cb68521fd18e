"""The files by which sentence-transformers opens an export of a model for retrieval: mean pooling and scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


def write_modules(folder: Path, head: dict[str, Any], width: int) -> None:
    """Write the list of modules and their settings beside a whole model or peft's adapter; vectors have this width."""
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
        for place, (path, name) in enumerate(_MODULES.items())
    ]
    for path in filter(None, _MODULES):
        (folder / path).mkdir()
    written: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": head["max_length"]},
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
