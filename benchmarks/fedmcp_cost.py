"""A batch of FedMCP against a batch of FedAvg with the same two adapters.

FedMCP needs three views with gradient and a constant one where FedAvg needs one with gradient. Both train on the same
rows of all silos in the same batches of 64, bottleneck adapters of r = 16, in the machine's precision. `one_by_one` is
FedMCP with every view in forwards of its own, as if nothing were shared. `*_gflop_per_row` are PyTorch's counts around
the same batches. The last key is the median of FedMCP / FedAvg.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.alternating import alternate, ratio
from silotune.models.forward.mixing import MixEntry
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import View
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--data", help="a folder laid out like data.path; else the demo's rows")


def measure(repeats: int, batch: int, threads: int, precision: str, data: str | None) -> dict[str, Any]:
    """Milliseconds per batch, FLOPs per row, share of padding, and the ratio."""
    words = [f"train.batch_size={batch}", f"threads={threads}", f"precision={precision}"]
    if data is not None:
        words += [f"data.path={data}", "data.tasks=[]", "data.rows_per_silo=256", "train.max_length=128"]
    fedmcp = build(read_config("demo", [*words, "method=fedmcp"]))
    backbone = fedmcp.backbone
    apart = build(read_config("demo", [*words, "method=fedmcp"]), backbone)
    _one_by_one(apart)
    fedavg = build(read_config("demo", [*words, "method=fedavg", "method.adapters=2"]), backbone)
    federations = {"fedmcp": fedmcp, "fedavg": fedavg, "one_by_one": apart}
    report: dict[str, Any] = {"precision": backbone.precision, "threads": torch.get_num_threads(), "repeats": repeats}
    rows = sum(silo.rows for silo in fedmcp.silos.values())
    batches = 0
    for name, federation in federations.items():
        with FlopCounterMode(display=False) as counter:
            metrics = _epoch(federation)()
        report[f"{name}_gflop_per_row"] = round(counter.get_total_flops() / rows / 1e9, 4)
        report[f"{name}_padded_over_real"] = round(metrics["padded_tokens"] / metrics["real_tokens"], 3)
        batches = int(metrics["steps"])
    if report["one_by_one_gflop_per_row"] <= report["fedmcp_gflop_per_row"]:
        raise AssertionError("one_by_one shares what it is there to compute apart")
    times = alternate({name: _epoch(federation) for name, federation in federations.items()}, repeats)
    for name, seconds in times.items():
        report[f"{name}_ms_per_batch"] = round(1000 * statistics.median(seconds) / batches, 1)
    report["one_by_one_over_fedavg"] = ratio(times["one_by_one"], times["fedavg"])["ratio"]
    return report | ratio(times["fedmcp"], times["fedavg"])


def _epoch(federation: Federation) -> Callable[[], dict[str, float]]:
    """One pass over every silo's rows; returns the sums of the rounds' metrics."""

    def run() -> dict[str, float]:
        sums: dict[str, float] = {}
        for silo in federation.silos.values():
            for name, value in federation.trainer.rounds([silo], federation.coordinator.shared, 1)[0].metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    return run


def _one_by_one(federation: Federation) -> None:
    training = federation.context
    together = training.program

    class Apart(ViewProgram):
        """A program for each view, which shares nothing with the others."""

        def __init__(self, mixes: Sequence[Mapping[str, Sequence[MixEntry]]], *more: Any) -> None:
            super().__init__(training.backbone, mixes)
            self._apart = [together([{name: own[name]} for own in mixes], *more) for name in mixes[0]]

        def run(self, *arguments: Any) -> list[dict[str, View]]:
            """See `ViewProgram.run`."""
            pieces = [program.run(*arguments) for program in self._apart]
            return [{name: view for own in silo for name, view in own.items()} for silo in zip(*pieces, strict=True)]

    training.program = Apart  # type: ignore[assignment, method-assign]
    training.replicas = lambda phase: 1  # type: ignore[method-assign]
