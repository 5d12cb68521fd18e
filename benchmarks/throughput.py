"""Training throughput of the in-process engine against a bare PyTorch loop over the same batches.

Both train one bottleneck adapter (r = 16) and an MLP head on MiniLM with Adam, at the same precision, on the same rows
in the same batches of 64. The bare loop is what one would write by hand: adapters as modules inside the model, every
batch padded to its longest row. Runs alternate; the medians are compared.

`..._share_of_peak` is the rate of the local steps over the machine's own rate of matrix products, measured between the
runs: the highest of square products of `SQUARES` at the same precision and number of threads. `needed` counts what the
real tokens take (`silotune cost`, for every row's own length), `paid` what was computed, padding included (PyTorch's
counter): 2·m·k·n for a product, forward, back through the activations, and for the gradients of what is trained.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.alternating import alternate, ratio
from silotune.cost.estimate import estimate
from silotune.data.batching import epoch_batches
from silotune.data.tokenized import TokenizedRows
from silotune.models.backbone.packages import default_backbone
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation

REPEATS = 5
BATCH = 64
SQUARES = (1024, 2048, 4096)
METHOD, ADAPTERS = "fedavg", "method.adapters=1"


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
    config = read_config("demo", [f"method={METHOD}", ADAPTERS, f"train.batch_size={BATCH}", "threads=2"])
    federation = build(config)
    silos = sorted(federation.silos)
    dtype = next(federation.backbone.module("encoder.layer.0.output.dense").parameters()).dtype
    ours: list[float] = []
    bare: list[float] = []
    peaks: list[float] = []
    for repeat in range(REPEATS + 1):
        measured = _ours(federation, silos), _bare(federation, silos), _peak(dtype)
        if repeat:  # the first is a warm-up
            for series, one in zip((ours, bare, peaks), measured, strict=True):
                series.append(one)
    rows = sum(federation.silos[name].rows for name in silos)
    with FlopCounterMode(display=False) as counter:
        _ours(federation, silos)
    paid, needed = counter.get_total_flops(), _needed(federation)
    rates = [paid / seconds for seconds in ours]
    return {
        "precision": federation.backbone.precision,
        "rows": rows,
        "silotune_rows_per_second": round(rows / statistics.median(ours), 1),
        "bare_rows_per_second": round(rows / statistics.median(bare), 1),
        "peak_gflop_per_second": round(statistics.median(peaks) / 1e9, 1),
        "paid_over_needed": round(paid / needed, 3),
        "needed_share_of_peak": ratio([rate * needed / paid for rate in rates], peaks)["ratio"],
        "paid_share_of_peak": ratio(rates, peaks)["ratio"],
        **ratio(bare, ours),
    }


def _peak(dtype: torch.dtype) -> float:
    """The most operations per second of any square product, each at its median."""
    return max(_rate(width, dtype) for width in SQUARES)


def _rate(width: int, dtype: torch.dtype) -> float:
    one, other = torch.randn(width, width).to(dtype), torch.randn(width, width).to(dtype)
    times = max(3, round((2048 / width) ** 3))
    seconds = alternate({"product": lambda: [torch.mm(one, other) for _ in range(times)]}, 5)["product"]
    return 2 * width**3 * times / statistics.median(seconds)


def _needed(federation: Federation) -> int:
    """Operations of one epoch over all silos' rows, each of its own length."""
    trained = [rows for silo in federation.silos.values() for rows in silo.train.values()]
    lengths = Counter(len(ids) for rows in trained for ids in rows.ids)
    return sum(
        rows * estimate(METHOD, [ADAPTERS, f"tokens={tokens}"]).flops_per_sample_train
        for tokens, rows in lengths.items()
    )


def _ours(federation: Federation, silos: list[str]) -> float:
    started = time.perf_counter()
    for name in silos:
        federation.trainer.rounds([federation.silos[name]], federation.coordinator.shared, 1)[0]
    return time.perf_counter() - started


def _bare(federation: Federation, silos: list[str]) -> float:
    model = _bare_model()
    head = nn.Sequential(nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 3))
    trained = [p for p in model.parameters() if p.requires_grad] + list(head.parameters())
    precision = federation.backbone.precision
    seconds = 0.0
    for name in silos:
        rows = next(iter(federation.silos[name].train.values()))
        batches = [_padded(rows, b.rows.tolist()) for b in epoch_batches({rows.task.name: rows}, BATCH, 0, 1, name)]
        optimizer = torch.optim.Adam(trained, lr=1e-3)
        started = time.perf_counter()
        for inputs, labels in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                states = model(**inputs).last_hidden_state
                mask = inputs["attention_mask"].unsqueeze(-1)
                logits = head((states * mask).sum(1) / mask.sum(1))
            loss = nn.functional.cross_entropy(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds += time.perf_counter() - started
    return seconds


def _bare_model() -> nn.Module:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(default_backbone(), dtype=torch.float32).eval().requires_grad_(False)
    for layer in model.encoder.layer:
        layer.attention.output.dense = Adapted(layer.attention.output.dense, 16)
        layer.output.dense = Adapted(layer.output.dense, 16)
    return model


def _padded(rows: TokenizedRows, indices: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    longest = max(len(rows.ids[row]) for row in indices)
    ids = torch.tensor([rows.ids[row] + [0] * (longest - len(rows.ids[row])) for row in indices])
    lengths = torch.tensor([len(rows.ids[row]) for row in indices]).unsqueeze(1)
    mask = (torch.arange(longest) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask}, rows.labels[indices]
