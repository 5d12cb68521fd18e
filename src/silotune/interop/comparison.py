"""Open an export as other programs do, and compare its logits on a few texts with the run's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from silotune.data.batching import make_batch
from silotune.data.tokenized import HEAD_INPUTS
from silotune.errors import library_errors
from silotune.evaluation.predict import Predictor, logits
from silotune.interop.onnx_model import onnx_logits
from silotune.interop.selection import ExportSelection
from silotune.interop.standalone import KINDS, TENSOR_HEADS, opened
from silotune.methods.base import PredictionMix
from silotune.models.backbone.quantization import NONE
from silotune.models.forward.mixing import make_plan
from silotune.runs.marked_texts import marking_head

TEXTS = (
    "It was worth the wait.",
    "no",
    "How many of the 42 parcels that were sent on Monday arrived late, and why?",
    "The clinic opens at eight; patients are asked to bring their papers, and to be there ten minutes before that.",
)
"""What both are asked, alone or as pairs of two that follow each other; a run's own rows are in no export."""

_NEEDED = {
    "peft": "the package peft, and a base that is not quantized",
    "onnx": "the package onnxruntime",
    "gguf": "llama.cpp",
    "silotune": "an entry in standalone.KINDS",
}


def compare(
    selection: ExportSelection, folder: Path, layout: str, base_class: str, whole: Any = None
) -> dict[str, Any] | None:
    """Compare an export with the run.

    `whole` is a model around the run's backbone that the export is opened over, if it is not the backbone.

    Returns:
        `texts`, the `largest_difference` of their logits, the run's `largest_logit`, and how many texts have the
        `same_answers`: the likeliest class, or the likeliest next token everywhere. None if what opens the export is
        not installed here, or the base is quantized (`in_words` says what is needed).
    """
    if selection.model.task.rules.by_position:
        context = copy.copy(selection.model.context)
        context.head = marking_head(context)
        selection = replace(selection, model=replace(selection.model, context=context))
    pair = selection.model.texts_per_row == 2 and selection.model.task.labeled
    texts: list[Any] = [*zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True)] if pair else [*TEXTS]
    own = _own(selection, texts)  # before the adapter is put into the backbone
    theirs = None
    with library_errors("export: its own check failed, so nothing is written"), suppress(ImportError):
        theirs = _theirs(selection, folder, layout, base_class, whole, texts)
    if theirs is None:
        return None
    differences = [float((one - other).abs().max()) for one, other in zip(own, theirs, strict=True)]
    same = [one.argmax(-1).equal(other.argmax(-1)) for one, other in zip(own, theirs, strict=True)]
    return {
        "texts": len(texts),
        "largest_difference": max(differences),
        "largest_logit": max(float(one.abs().max()) for one in own),
        "same_answers": sum(same),
    }


def in_words(result: dict[str, Any] | None, layout: str) -> str:
    """Return what a comparison found as one sentence."""
    if result is None:
        return f"not compared with the run: that needs {_NEEDED[layout]}"
    return (
        f"opened and compared: on {result['texts']} texts the logits are the run's within "
        f"{result['largest_difference']:.1e} (the largest is {result['largest_logit']:.1f}); "
        f"{result['same_answers']} of {result['texts']} have the same answer"
    )


@torch.no_grad()
def _own(selection: ExportSelection, texts: list[Any]) -> list[Tensor]:
    """Return the run's logits of each text: of classes, or of the vocabulary after each token."""
    model, context = selection.model, copy.copy(selection.model.context)
    context.prediction = PredictionMix(selection.mix, selection.head_part)
    rows = model.encoded(texts)
    if rows.reads is not None and context.head.name in TENSOR_HEADS:
        return list(torch.split(logits(context, model.state, rows), [*map(len, rows.reads)]))
    if context.head.name in TENSOR_HEADS:
        return list(logits(context, model.state, rows))
    backbone = context.backbone
    plan = make_plan(backbone, Predictor(context, model.state).mix())
    assert backbone.lm_head is not None, "a head without tensors reads the vocabulary"
    return [
        backbone.lm_head(backbone.encode(inputs, plan), None, plan.weights)[0] for inputs in _inputs(selection, texts)
    ]


def _inputs(selection: ExportSelection, texts: list[Any]) -> Iterator[dict[str, Tensor]]:
    rows = selection.model.encoded(texts)
    for row in range(len(rows)):
        inputs = make_batch(rows, [row], selection.model.context.backbone.pad_id).micro[0].inputs
        yield {name: tensor for name, tensor in inputs.items() if name not in HEAD_INPUTS}


@torch.no_grad()
def _theirs(
    selection: ExportSelection, folder: Path, layout: str, base_class: str, whole: Any, texts: list[Any]
) -> list[Tensor] | None:
    """Compute the logits of an export with the library that it is for; None if no Python library can open it."""
    if layout == "gguf" or (layout == "silotune" and selection.tuner.name not in KINDS):
        return None
    if layout == "peft" and selection.model.context.backbone.quantization != NONE:
        return None  # peft cannot take an adapter out of a quantized model again
    if layout == "onnx":
        return _read(selection, onnx_logits(folder, texts), texts)
    with _opened(selection, folder, layout, base_class, whole) as model:
        if model.head["kind"] in TENSOR_HEADS:
            return _read(selection, model.logits(texts), texts)
        by_text = []
        for inputs in _inputs(selection, texts):
            columns = inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1]
            by_text.append(model.model(**inputs).logits[0, -columns:])  # without virtual tokens before the text
        return by_text


def _read(selection: ExportSelection, tensor: Tensor, texts: list[Any]) -> list[Tensor]:
    """Return each text's logits, of a head that marks spans those at the tokens that it reads."""
    reads = selection.model.encoded(texts).reads
    return list(tensor) if reads is None else [own[places] for own, places in zip(tensor, reads, strict=True)]


@contextmanager
def _opened(selection: ExportSelection, folder: Path, layout: str, base_class: str, whole: Any) -> Iterator[Any]:
    """Open an export over the run's own backbone, as a second one may not fit, and take it out again."""
    import transformers

    own = whole or selection.model.context.backbone.model
    if layout == "weights":
        own = getattr(transformers, base_class).from_pretrained(folder, dtype=torch.float32)
    model = opened(own, folder, layout)
    virtual = selection.tuner.virtual_tokens > 0
    if layout == "peft" and virtual and model.head["kind"] not in TENSOR_HEADS:
        from peft import PeftModel

        model.model = PeftModel.from_pretrained(own, str(folder)).eval()
    try:
        yield model
    finally:
        for handle in model.handles:
            handle.remove()
        if layout == "peft" and not virtual:
            model.model.unload()
