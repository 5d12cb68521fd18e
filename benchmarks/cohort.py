"""Silos trained together against silos trained one by one, in silos per second: FedAvg of LoRA (r = 8) on MiniLM.

Every silo holds rows for `STEPS` batches of 16; a silo's turn is all of it: the broadcast's bytes in, its local round,
its update's bytes out. Serial and cohort turns alternate over the same silos; the medians are compared. The device is
the one the project chooses; on a GPU, its memory at the most is said too. With `--head lm` every row has an answer, of
as many words, which a causal model learns to write.

The last key, `ratio`, is the time of the serial turns over that of the cohorts'.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternating import alternate, ratio
from benchmarks.silos import tiny_backbone
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation

REPEATS = 5
BATCH = 16
STEPS = 2
WORDS = (8, 40)
"""Words of a text, at least and at most."""


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--cohort", type=int, default=32, help="silos that train together")
    parser.add_argument("--silos", type=int, default=32, help="silos in all")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--tuner", default="lora")
    parser.add_argument("--head", default="linear", choices=("linear", "lm"))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow blocks, for a quick look")
    parser.add_argument("--model", help="a folder of weights; else MiniLM")
    parser.add_argument("--device", default="auto")


def measure(
    cohort: int = 32,
    silos: int = 32,
    method: str = "fedavg",
    tuner: str = "lora",
    precision: str = "auto",
    tiny: bool = False,
    model: str | None = None,
    device: str = "auto",
    head: str = "linear",
) -> dict[str, Any]:
    """Silos per second one by one and together, and their ratio."""
    with tempfile.TemporaryDirectory() as directory:
        source = model or (tiny_backbone(Path(directory) / "tiny", 64, 2) if tiny else "default")
        words = [f"method={method}", f"tuner={tuner}", f"head={head}", f"backbone={source}", f"cohort={cohort}"]
        words += [f"train.batch_size={BATCH}", "threads=1", f"precision={precision}", f"device={device}"]
        federation = _federation(words, silos, writes=head == "lm")
    on_gpu = federation.backbone.device.type == "cuda"
    names = list(federation.silos)
    work = {
        "serial": lambda: _turns(federation, [[name] for name in names]),
        "cohort": lambda: _turns(federation, [names[at : at + cohort] for at in range(0, silos, cohort)]),
    }
    memory = {f"{name}_gpu_mib": _gpu_mib(run) for name, run in work.items()} if on_gpu else {}
    times = alternate(work, REPEATS)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "backbone": model or ("tiny" if tiny else "minilm"),
        "precision": federation.backbone.precision,
        "method": method,
        "tuner": tuner,
        "head": head,
        "batch": BATCH,
        "steps": STEPS,
        "silos": silos,
        "cohort": cohort,
        **{f"{name}_silos_per_second": round(silos / statistics.median(seconds), 2) for name, seconds in times.items()},
        **memory,
        **ratio(times["serial"], times["cohort"]),
    }


def _federation(words: list[str], silos: int, writes: bool) -> Federation:
    """Silos of one task, with rows of their own and none to be judged on."""
    draws = random.Random(1)
    task = Task("task", (), "rouge1", "generation") if writes else Task("task", ("a", "b"))

    def row(number: int) -> Row:
        length = draws.randint(*WORDS)
        text = " ".join(draws.choice(("river", "doctor", "warm", "letter")) for _ in range(length))
        return Row((text,), number % 2) if task.labels else Row((text, ""), 0, text)

    data = [
        SiloData(f"silo-{number:04d}", task, Splits(train=[row(n) for n in range(BATCH * STEPS)]))
        for number in range(silos)
    ]
    return build(read_config("demo", words), data=data)


def _turns(federation: Federation, cohorts: list[list[str]]) -> None:
    broadcast = federation.coordinator.broadcast(1)
    participant = federation.client()
    for names in cohorts:
        participant.rounds([federation.silos[name] for name in names], broadcast)


def _gpu_mib(run: Callable[[], None]) -> float:
    torch.cuda.reset_peak_memory_stats()
    run()
    return round(torch.cuda.max_memory_allocated() / 2**20, 1)
