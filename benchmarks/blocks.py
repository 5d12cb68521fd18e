"""A round's local steps with adapters in the last k blocks alone, against adapters in all.

FedAvg with LoRA (r = 8, query and value) over all silos' rows, batches of 64. `none` computes what lies below the
lowest adapter in every step, `cold` has an empty `cache=frozen-prefix` in each turn, `warm` one that a round has
filled. The last key is all / warm.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.alternating import alternate, ratio
from silotune.models.forward.activation_cache import ActivationCache
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's own options."""
    parser.add_argument("--last", type=int, default=3, help="k, half of MiniLM's blocks unless given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--backbone", default="default")
    parser.add_argument("--rows", type=int, default=256, help="of a silo, at most")
    parser.add_argument("--data", help="a folder laid out like data.path; else the demo's rows")


def measure(
    last: int, repeats: int, batch: int, threads: int, precision: str, backbone: str, rows: int, data: str | None
) -> dict[str, Any]:
    """Rows per second of each way, and all / each."""
    words = ["method=fedavg", "method.adapters=1", "tuner=lora", "tuner.r=8", "tuner.sites=[query,value]"]
    words += [f"train.batch_size={batch}", f"threads={threads}", f"precision={precision}", f"backbone={backbone}"]
    words += [f"data.rows_per_silo={rows}", "head.name=linear"]
    if data is not None:
        words += [f"data.path={data}", "data.tasks=[]", "train.max_length=128"]
    whole = build(read_config("demo", words))
    upper = [*words, f"tuner.blocks=last:{last}"]
    none = build(read_config("demo", upper), whole.backbone)
    cached = read_config("demo", [*upper, "cache=frozen-prefix"])
    warm, cold = (build(cached, whole.backbone) for _ in range(2))
    work = {"all": _round(whole), "none": _round(none), "cold": _round(cold, cached.cache.mib), "warm": _round(warm)}
    times = alternate(work, repeats)
    count = sum(silo.rows for silo in whole.silos.values())
    report: dict[str, Any] = {"precision": whole.backbone.precision, "threads": torch.get_num_threads(), "last": last}
    for name, seconds in times.items():
        report[f"{name}_rows_per_second"] = round(count / statistics.median(seconds), 1)
    for name in ("none", "cold"):
        report |= {f"{key}_{name}": value for key, value in ratio(times["all"], times[name]).items()}
    return report | ratio(times["all"], times["warm"])


def _round(federation: Federation, mib: int | None = None) -> Callable[[], None]:
    """A pass over every silo's rows, with a new cache of so many MiB each time where they are given."""

    def run() -> None:
        if mib is not None:
            federation.context.cache = ActivationCache(mib)
        for silo in federation.silos.values():
            federation.trainer.rounds([silo], federation.coordinator.shared, 1)

    return run
