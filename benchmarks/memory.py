"""Memory of one training step from shapes alone: LLaMA-7B in bf16, no weights, no GPU, no arithmetic.

The method's own step (views, loss, backward pass, micro-batches) runs on fake tensors, and the bytes of all tensors
that are alive are counted. Rows are full: 512 tokens of which the last half is the response. Parts, received copies,
gradients and the optimizer's state of LoRA are in the total; the CUDA context and the allocator's fragments are not.
With `--quantization` the weights' bytes follow from the layers' shapes, and the step is the plain model's with the
largest layer once more, as bf16: that is what bitsandbytes unpacks in a product of nf4.

The last key, `ratio`, is the total over the weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.live_bytes import LiveBytes
from silotune.config import TrainConfig
from silotune.core.tensors import State, copy
from silotune.cost.backbone_shapes import read_shape_config
from silotune.data.batching import Batch, Piece, make_batch
from silotune.data.tasks import Task
from silotune.data.tokenized import Inputs, TokenizedRows
from silotune.methods import METHODS, LocalTraining, Setting
from silotune.methods.parts import Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.padding import Padding
from silotune.models.backbone.quantization import QUANTIZATIONS, quantized_shapes, weight_bytes
from silotune.models.forward.views import ConstantViews
from silotune.models.heads import HEADS
from silotune.models.tuners import TUNERS
from silotune.training.context import TrainingContext
from silotune.training.phase_batches import token_limit
from silotune.training.step_gradients import SiloStep, StepGradients

GIB = 2**30
_TASK = Task("rows", (), metric="rouge1", kind="generation")


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--method", default="feddpa-t")
    parser.add_argument("--shape", default="shape:llama-7b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row")
    parser.add_argument("--tokens-at-once", type=int, default=None)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--quantization", choices=("none", *QUANTIZATIONS), default="none")


def measure(
    method: str = "feddpa-t",
    shape: str = "shape:llama-7b",
    batch: int = 32,
    tokens: int = 512,
    tokens_at_once: int | None = None,
    checkpointing: bool = False,
    quantization: str = "none",
) -> dict[str, Any]:
    """The memory of a step in GiB: weights, what the step adds at most, and both with the optimizer's state."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    rows = _rows(batch, tokens)
    with mode:
        backbone = _backbone(shape, checkpointing)
    train = TrainConfig(batch_size=batch, max_length=tokens, gradient_checkpointing=checkpointing)
    instance = METHODS[method](Setting(TUNERS["lora"](), HEADS["lm"](), Scope.SHARED))
    context = TrainingContext(backbone, instance, train, 0, tokens_at_once=tokens_at_once)
    weights = weight_bytes(backbone.model, quantization, 2)
    unpacked = max(2 * outputs * inputs for outputs, inputs in quantized_shapes(backbone.model, "nf4").values())
    most = parts = 0
    for phase in context.phases:
        if phase.when != "round":
            continue
        limit = token_limit(context, phase, [])
        step_batch = make_batch(rows, range(batch), 0, backbone.call_cost, limit)
        with mode:
            draws = torch.Generator().manual_seed(0)
            state: State = {name: part.module.init(backbone, [_TASK], draws) for name, part in context.parts.items()}
            received = {name: copy(tensors) for name, tensors in state.items()}
            for name in phase.trains:
                state[name] = {key: tensor.requires_grad_() for key, tensor in state[name].items()}
            mixes = {name: context.resolve(mix, state, received, {}) for name, mix in phase.views.items()}
            quiet = LocalTraining(train.lr, {}, {})
            step = SiloStep(step_batch, state, received, {}, ConstantViews(), ("dropout", "silo"), _same, quiet)
            with _reads_on_the_host(), LiveBytes() as live:
                StepGradients(context, phase).add(context.program([mixes], True), [step], step_batch.micro)
        most = max(most, live.most)
        size = sum(t.numel() * 4 for part in (state, received) for tensors in part.values() for t in tensors.values())
        moments = sum(2 * 4 * t.numel() for name in phase.trains for t in state[name].values())
        parts = max(parts, size + moments)
    most += 0 if quantization == "none" else unpacked
    return {
        "method": method,
        "backbone": shape,
        "rows": f"{batch} x {tokens}",
        "tokens_at_once": tokens_at_once,
        "gradient_checkpointing": checkpointing,
        "quantization": quantization,
        "weights_gib": round(weights / GIB, 2),
        "step_gib": round(most / GIB, 2),
        "parts_gib": round(parts / GIB, 2),
        "total_gib": round((weights + most + parts) / GIB, 2),
        "ratio": round((weights + most + parts) / weights, 2),
    }


@contextmanager
def _reads_on_the_host() -> Iterator[None]:
    """Let sizes and masks, which are on the CPU and have data, be read while everything else has none."""
    tolist, of, piece = torch.Tensor.tolist, Padding.of, Batch.piece

    def read(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, FakeTensor):
            return tolist(tensor)
        with _disable_current_modes():
            return tolist(tensor)

    def look(inputs: Inputs) -> Padding | None:
        with _disable_current_modes():
            return of(inputs)

    def cut(batch: Batch, rows: Piece) -> Batch:
        with _disable_current_modes():
            return piece(batch, rows)

    with (
        patch.object(torch.Tensor, "tolist", read),
        patch.object(Padding, "of", look),
        patch.object(Batch, "piece", cut),
    ):
        yield


def _same(loss: torch.Tensor) -> torch.Tensor:
    return loss


def _rows(count: int, tokens: int) -> TokenizedRows:
    """Full rows whose token ids mean nothing."""
    half = tokens // 2
    reads, targets = [list(range(half - 1, tokens - 1))] * count, [[1] * (tokens - half)] * count
    labels = torch.zeros(count, dtype=torch.int64)
    return TokenizedRows(_TASK, [[1] * tokens] * count, None, labels, reads=reads, targets=targets)


def _backbone(shape: str, checkpointing: bool) -> Backbone:
    """A backbone without data whose linear layers, embeddings and head are bf16, as a GPU holds them."""
    from transformers import AutoModelForCausalLM

    config = read_shape_config(shape)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return Backbone(model, None, precision="bf16", checkpointing=checkpointing)  # type: ignore[arg-type]
