"""Training throughput of the in-process engine against a bare PyTorch loop over the same batches.

Both train one bottleneck adapter (r = 16) and an MLP head on MiniLM with Adam, at the same precision, on the same rows
in the same batches of 64. The bare loop is what one would write by hand: adapters as modules inside the model, every
batch padded to its longest row. Runs alternate; the medians are compared.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from silotune.assembly.building import build
from silotune.assembly.configuration import read_config
from silotune.assembly.federation import Federation
from silotune.data.batching import TokenisedRows, epoch
from silotune.pretrained import default_backbone

REPEATS = 5
BATCH = 64


class Adapted(nn.Module):
    """A linear layer followed by a bottleneck adapter."""

    def __init__(self, linear: nn.Linear, r: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.out_features, r)
        self.up = nn.Linear(r, linear.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer's output plus the adapter's."""
        h = self.linear(x)
        return h + self.up(nn.functional.gelu(self.down(h)))


def measure() -> dict[str, Any]:
    """Rows per second of both, and their ratio (ours / bare)."""
    config = read_config("demo", ["method=fedavg", "method.adapters=1", f"train.batch_size={BATCH}", "threads=2"])
    federation = build(config)
    silos = sorted(federation.silos)
    ours: list[float] = []
    bare: list[float] = []
    for repeat in range(REPEATS + 1):
        seconds = _ours(federation, silos), _bare(federation, silos)
        if repeat:  # the first is a warm-up
            ours.append(seconds[0])
            bare.append(seconds[1])
    rows = sum(federation.silos[name].rows for name in silos)
    ratios = [b / o for o, b in zip(ours, bare, strict=True)]
    return {
        "precision": federation.backbone.precision,
        "rows": rows,
        "silotune_rows_per_second": round(rows / statistics.median(ours), 1),
        "bare_rows_per_second": round(rows / statistics.median(bare), 1),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "ratio": round(statistics.median(ratios), 3),
    }


def _ours(federation: Federation, silos: list[str]) -> float:
    started = time.perf_counter()
    for name in silos:
        federation.training.round(federation.silos[name], federation.coordinator.shared, 1)
    return time.perf_counter() - started


def _bare(federation: Federation, silos: list[str]) -> float:
    model = _bare_model()
    head = nn.Sequential(nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 3))
    trained = [p for p in model.parameters() if p.requires_grad] + list(head.parameters())
    precision = federation.backbone.precision
    seconds = 0.0
    for name in silos:
        rows = next(iter(federation.silos[name].train.values()))
        batches = [_padded(rows, b.rows.tolist()) for b in epoch({rows.task.name: rows}, BATCH, 0, 1, name)]
        optimiser = torch.optim.Adam(trained, lr=1e-3)
        started = time.perf_counter()
        for inputs, labels in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                states = model(**inputs).last_hidden_state
                mask = inputs["attention_mask"].unsqueeze(-1)
                logits = head((states * mask).sum(1) / mask.sum(1))
            loss = nn.functional.cross_entropy(logits.float(), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        seconds += time.perf_counter() - started
    return seconds


def _bare_model() -> nn.Module:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(default_backbone(), dtype=torch.float32).eval().requires_grad_(False)
    for layer in model.encoder.layer:
        layer.attention.output.dense = Adapted(layer.attention.output.dense, 16)
        layer.output.dense = Adapted(layer.output.dense, 16)
    return model


def _padded(rows: TokenisedRows, chosen: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    longest = max(len(rows.ids[row]) for row in chosen)
    ids = torch.tensor([rows.ids[row] + [0] * (longest - len(rows.ids[row])) for row in chosen])
    lengths = torch.tensor([len(rows.ids[row]) for row in chosen]).unsqueeze(1)
    mask = (torch.arange(longest) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask}, rows.labels[chosen]
