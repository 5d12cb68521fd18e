"""Write an export's `README.md`: content, training data, scores, privacy, and code that loads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from silotune.core.numeric import score_text
from silotune.data.tasks import lower_is_better
from silotune.interop.comparison import in_words
from silotune.interop.served_lora import SERVERS, server_rank
from silotune.interop.standalone import CLASSIFIERS, TENSOR_HEADS
from silotune.interop.token_classifier import CLASS

DEFAULT_BASE = "sentence-transformers/all-MiniLM-L6-v2"
"""Name on the Hugging Face hub of the backbone `default`."""


def card(about: dict[str, Any], head: dict[str, Any]) -> str:
    """Write the card's text from `model_card.md`, with the fields by which the hub finds models."""
    from huggingface_hub import ModelCard, ModelCardData

    has_tensors = head["kind"] in TENSOR_HEADS
    usual = {"entities": "token-classification", "retrieval": "sentence-similarity"}
    pipeline = "text-classification" if head["kind"] in CLASSIFIERS else usual.get(head["kind"])
    writes = about["base_class"] == "AutoModelForCausalLM"
    data = ModelCardData(
        base_model=about["base_model"],
        library_name={"peft": "peft", "weights": "transformers", "onnx": "onnx"}.get(about["layout"], "silotune"),
        pipeline_tag=pipeline if has_tensors else "text-generation" if writes else None,
        tags=list(dict.fromkeys(["silotune", "federated-learning", about["method"]["name"], about["trained_tuner"]])),
    )
    comparison = in_words(about["comparison"], about["layout"])
    written = ModelCard.from_template(
        data,
        template_str=files("silotune.interop").joinpath("model_card.md").read_text(encoding="utf-8"),
        about=about,
        head=head,
        base=json.dumps(about["base_model"]),
        options=", ".join(f"{key}={_shown(value)}" for key, value in about["tuner"].items() if key != "name"),
        mixed=_mixed,
        score=score_text,
        unit="" if lower_is_better(about["metric"]) else " (%)",
        rank=server_rank(about) if about["for"] in SERVERS else None,
        has_tensors=has_tensors,
        tags=json.dumps(head["tags"], ensure_ascii=False) if about["base_class"] == CLASS else None,
        default_base=DEFAULT_BASE,
        comparison=comparison[0].upper() + comparison[1:],
    )
    return str(written)


def _mixed(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{weight:g} · {name}" for name, weight in weights.items())


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
