"""What noise on rows costs a step, in time and in memory, beside training without it and beside Opacus' ghost clipping.

LoRA (r = 8 on query and value) and, for a classifier, its head train eight steps on one batch of rows, which every side
computes whole. `--model` names a causal model's folder or `smollm2`; without it, MiniLM classifies. Sides are timed in
turns, in processor seconds; memory is the most that a process for one side alone held resident. Opacus is measured
where it is installed. The last key is time with noise over time without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.alternating import alternate, ratio
from benchmarks.llm_throughput import Sizes, _rows
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.models.backbone.loading import load_backbone
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config

STEPS, RATE = 8, 1e-3
SETTING = (
    *("method=fedavg", "method.adapters=1", "tuner=lora", "tuner.r=8", "tuner.alpha=16", "rounds=1"),
    *(f"train.steps={STEPS}", "train.optimizer=adam", f"train.lr={RATE}", "data.merge=false", "precision=fp32"),
)
NOISE = ("privacy.unit=row", "privacy.epsilon=8")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's own options."""
    parser.add_argument("--model", help="a causal model's folder, or smollm2; else MiniLM as classifier")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)


def measure(model: str | None = None, batch: int = 16, repeats: int = 5, threads: int = 1) -> dict[str, Any]:
    """Return milliseconds a step and MiB of each side, and their ratios."""
    torch.set_num_threads(threads)
    sides: dict[str, Callable[[str | None, int], Callable[[], object]]] = {
        "plain": partial(_ours, ()),
        "noise": partial(_ours, NOISE),
    }
    if importlib.util.find_spec("opacus"):
        sides["opacus"] = _opacus
    report: dict[str, Any] = {"model": model or "default", "batch": batch, "repeats": repeats, "threads": threads}
    for name, side in sides.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            report[f"{name}_mib"] = pool.apply(_memory, (side, model, batch, threads))
    times = alternate({name: side(model, batch) for name, side in sides.items()}, repeats, clock=time.process_time)
    for name, seconds in times.items():
        report[f"{name}_ms_per_step"] = round(1000 * statistics.median(seconds) / STEPS, 1)
    report["memory_ratio"] = round(report["noise_mib"] / report["plain_mib"], 3)
    if "opacus" in times:
        report["opacus_over_noise"] = ratio(times["opacus"], times["noise"])["ratio"]
    return report | ratio(times["noise"], times["plain"])


def _memory(
    side: Callable[[str | None, int], Callable[[], object]], model: str | None, batch: int, threads: int
) -> int:
    torch.set_num_threads(threads)
    side(model, batch)()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _ours(noise: tuple[str, ...], model: str | None, batch: int) -> Callable[[], object]:
    """Return a function that trains eight steps of one silo."""
    words = [*SETTING, *noise, f"train.batch_size={batch}", f"threads={torch.get_num_threads()}"]
    words += (
        ["head=linear", "head.pooling=mean"]
        if model is None
        else ["head=lm", "train.max_length=256", f"backbone={model}"]
    )
    rows = _texts(model, batch)
    federation = build(read_config("demo", words), data=[SiloData("silo", _task(model), Splits(rows, [], rows[:1]))])
    return lambda: federation.trainer.rounds([*federation.silos.values()], federation.coordinator.shared, 1)


def _task(model: str | None) -> Task:
    return Task("rows", ("a", "b")) if model is None else Task("rows", (), "rouge1", "generation")


def _texts(model: str | None, batch: int) -> list[Row]:
    rows = _rows(batch, Sizes(), words=False)
    return rows if model else [Row((row.texts[0],), number % 2) for number, row in enumerate(rows)]


def _opacus(model: str | None, batch: int) -> Callable[[], object]:
    """Return a function that trains eight steps under Opacus, on the token ids of our rows."""
    from opacus import PrivacyEngine
    from peft import LoraConfig, get_peft_model

    backbone = load_backbone(model or "default", precision="fp32")
    texts = [row.texts[0] if model is None else f"{row.texts[0]} {row.answer}" for row in _texts(model, batch)]
    inputs = dict(backbone.tokenizer(texts, padding=True, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    targets = ["query", "value"] if model is None else ["q_proj", "v_proj"]
    adapted = get_peft_model(backbone.model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    network: torch.nn.Module = _Classifier(adapted) if model is None else _Writer(adapted)
    labels = torch.arange(batch) % 2 if model is None else inputs["input_ids"]
    optimizer = torch.optim.Adam([each for each in network.parameters() if each.requires_grad], lr=RATE)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(labels), batch_size=batch)
    network, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=network.train(),
        optimizer=optimizer,
        data_loader=loader,
        criterion=torch.nn.CrossEntropyLoss() if model is None else _MeanOfTokens(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        poisson_sampling=False,
    )

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            criterion(network(**inputs), labels).backward()
            optimizer.step()

    return run


class _Classifier(torch.nn.Module):
    """An adapted encoder and a linear head on the mean of its states."""

    def __init__(self, adapted: Any) -> None:
        super().__init__()
        self.adapted, self.head = adapted, torch.nn.Linear(adapted.config.hidden_size, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.adapted(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None]
        return self.head((states * mask).sum(1) / mask.sum(1))


class _Writer(torch.nn.Module):
    """An adapted causal model that returns logits."""

    def __init__(self, adapted: Any) -> None:
        super().__init__()
        self.adapted = adapted

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.adapted(**inputs, use_cache=False).logits


class _MeanOfTokens(torch.nn.Module):
    """The mean loss of each row's tokens, and of rows where `reduction` says so."""

    reduction = "mean"

    def forward(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)
        return losses.mean() if self.reduction == "mean" else losses
