"""A training step's peak memory on a GPU against the estimate of `silotune cost`."""

from __future__ import annotations

from typing import Any

import torch

from silotune.cost.estimate import estimate
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config


def measure_step(method: str, tuner: str, model: str, device: str, batch: int, tokens: int) -> dict[str, Any]:
    """Estimate and measure one step in float32 over rows of full length.

    Args:
        method: its id.
        tuner: its tuner.
        model: a folder of weights.
        device: where the step runs; on a CPU only the estimate is given, because nothing counts memory there.
        batch: rows.
        tokens: tokens per row.
    """
    words = [f"tuner={tuner}", f"backbone={model}", f"train.batch_size={batch}", f"train.max_length={tokens}"]
    words += ["head=linear", "precision=fp32"]
    predicted = estimate(method, [*words, f"tokens={tokens}"]).peak_memory_mib
    federation = build(
        read_config("demo", [f"method={method}", *words, f"device={device}", "train.steps=1", "data.merge=false"]),
        data=[SiloData("silo", Task("task", ("a", "b")), Splits([Row(("a " * tokens,), n % 2) for n in range(batch)]))],
    )
    on_gpu = federation.backbone.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    federation.client().rounds([*federation.silos.values()], federation.coordinator.broadcast(1))
    if not on_gpu:
        return {"predicted_mib": round(predicted, 1), "measured_mib": None, "ratio": None}
    measured = torch.cuda.max_memory_allocated() / 2**20
    return {
        "predicted_mib": round(predicted, 1),
        "measured_mib": round(measured, 1),
        "ratio": round(measured / predicted, 3),
    }
