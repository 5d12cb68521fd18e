"""A classifier with its adapters and head as one ONNX graph, from token ids to logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from silotune.core.tensors import Tensors
from silotune.errors import InputError, library_errors, needs
from silotune.interop.adapters import can_fold
from silotune.interop.selection import ExportSelection
from silotune.interop.standalone import TENSOR_HEADS, head_logits, of_texts, window_words

FILE = "model.onnx"


class _ExportedClassifier(nn.Module):
    def __init__(self, model: Any, head: dict[str, Any], tensors: Tensors) -> None:
        super().__init__()
        base = model.base_model
        self.body = base.encoder if base.config.is_encoder_decoder else base
        self._head, self._tensors = head, tensors

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        states = self.body(input_ids=input_ids, attention_mask=attention_mask, **segments).last_hidden_state
        return head_logits(states, attention_mask, self._head, self._tensors)


def check_classifier(selection: ExportSelection) -> None:
    """Refuse a model whose head has no tensors, or whose adapter is not a change of weights."""
    head, tuner = selection.model.context.head.name, selection.tuner
    if head not in TENSOR_HEADS:
        raise InputError(f"export: --for onnx writes classifiers (head {' or '.join(TENSOR_HEADS)}), not head={head}")
    if not can_fold(tuner):
        raise InputError(f"export: --for onnx folds adapters into weights, and tuner={tuner.name} cannot be")


def write_onnx(path: Path, model: Any, selection: ExportSelection, head: dict[str, Any]) -> None:
    """Write the graph, for batches and texts of all sizes, in float32."""
    with needs("export: --for onnx needs the packages onnx, onnxscript and onnxruntime", "onnx"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    tokenizer = selection.model.context.backbone.tokenizer
    segments = "token_type_ids" in tokenizer.model_input_names and not model.config.is_encoder_decoder
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if segments else ()))
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with library_errors("export: PyTorch cannot write this model as ONNX"):
        torch.onnx.export(
            _ExportedClassifier(model, head, selection.head_tensors).eval(),
            tuple(torch.full((3, 7), int(name != "token_type_ids")) for name in names),
            str(path),
            input_names=list(names),
            output_names=["logits"],
            dynamic_shapes=tuple(sizes for _ in names),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def onnx_logits(folder: Path, texts: Sequence[Any]) -> Tensor:
    """Return the logits that onnxruntime computes from an export's folder, as `standalone.Model.logits`."""
    import onnxruntime
    from transformers import AutoTokenizer

    head = json.loads((folder / "head.json").read_text(encoding="utf-8"))
    columns = zip(*((text,) if isinstance(text, str) else text for text in texts), strict=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(*map(list, columns), padding=True, return_tensors="np", **window_words(head))
    session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {node.name: inputs[node.name] for node in session.get_inputs()})
    return of_texts(torch.from_numpy(logits), inputs)
