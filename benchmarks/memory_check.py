"""A training step's peak memory against the estimate of `silotune cost`: what a GPU held, or live tensors on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.live_bytes import LiveBytes
from silotune.cost.estimate import estimate
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config


def measure_step(
    method: str, tuner: str, model: str, device: str, batch: int, tokens: int, head: str = "linear"
) -> dict[str, Any]:
    """Estimate and measure one step in float32 over rows of full length.

    Args:
        method: its id.
        tuner: its tuner.
        model: a folder of weights.
        device: where the step runs; on a CPU the bytes of weights and of live tensors are summed.
        batch: rows.
        tokens: tokens per row.
        head: `linear`, or `lm` for a causal model, where the second half of a row is its answer.
    """
    words = [f"tuner={tuner}", f"backbone={model}", f"train.batch_size={batch}", f"train.max_length={tokens}"]
    words += [f"head={head}", "precision=fp32", "data.allow_cut=true"]
    predicted = estimate(method, [*words, f"tokens={tokens}"]).peak_memory_mib
    if head == "lm":
        half = "a " * (tokens // 2)
        task, row = Task("task", (), "rouge1", "generation"), Row((half, ""), 0, half)
    else:
        task, row = Task("task", ("a", "b")), Row(("a " * tokens,), 0)
    federation = build(
        read_config("demo", [f"method={method}", *words, f"device={device}", "train.steps=1", "data.merge=false"]),
        data=[SiloData("silo", task, Splits([row] * batch))],
    )
    on_gpu = federation.backbone.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with nullcontext() if on_gpu else LiveBytes() as live:
        federation.client().rounds([*federation.silos.values()], federation.coordinator.broadcast(1))
    if live is None:
        most = torch.cuda.max_memory_allocated()
    else:
        most = live.most + sum(tensor.nbytes for tensor in federation.backbone.model.parameters())
    measured = most / 2**20
    return {
        "predicted_mib": round(predicted, 2),
        "measured_mib": round(measured, 2),
        "ratio": round(measured / predicted, 3),
    }
