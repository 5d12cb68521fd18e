"""What the peers' benchmarks need: the same rows for both sides, and each side as a command in a process of its own.

Six silos, at most 256 training rows each, FedAvg of LoRA (r = 8 on query and value) with linear heads on MiniLM,
batches of 64, Adam, 3 rounds of one epoch, no scoring. Times are of whole commands, from start to end. With `--silos`
above six, each of the six sets of rows is dealt over its share of the silos, again from its start where it ends; where
a silo's rows would be of one class, the last is one of another.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.alternating import alternate, ratio
from silotune.errors import InputError

SETS, ROWS, ROUNDS, BATCH, RATE, LENGTH = 6, 256, 3, 64, 1e-3, 128


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", help="a folder laid out like data.path; else the demo's rows")
    parser.add_argument("--silos", type=int, default=SETS)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a silo, at most")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--precisions", default="fp32,bf16", help="of the peer")
    parser.add_argument("--precision", default="auto", help="of ours; auto is its own best")


def require(module: str, what: str, install: str) -> None:
    """Refuse in one line where a peer is not installed.

    Raises:
        InputError: with the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{what} is not installed; allowed: after {install}")


@contextmanager
def same_rows(data: str | None, number: int, at_most: int, rounds: int) -> Iterator[Path]:
    """A folder with `rows.json` for the peer and `ours.yaml` for silotune: equal training rows, silo by silo.

    Args:
        data: a folder laid out like `data.path`; None: the demo's rows.
        number: of silos.
        at_most: rows of a silo.
        rounds: of the run.
    """
    from silotune.data.loading import load_silos
    from silotune.models.backbone.packages import default_backbone
    from silotune.runs.build.resolve import read_config

    words = [] if data is None else [f"data.path={data}", "data.tasks=[]", "data.merge=false"]
    sets = load_silos(read_config("demo", words))[:SETS]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        peers, ours = [], []
        for position in range(number):
            turn, silo = position // len(sets), sets[position % len(sets)]
            name = silo.name if number <= len(sets) else f"{silo.name}-{turn}"
            available = silo.splits.train
            first = turn * at_most
            rows = [available[(first + offset) % len(available)] for offset in range(min(at_most, len(available)))]
            if len({row.label for row in rows}) == 1:
                rows[-1] = next(row for row in available if row.label != rows[0].label)
            columns = [f"text_{place}" for place in range(len(rows[0].texts))]
            peers.append({"labels": len(silo.task.labels), "rows": [[list(row.texts), row.label] for row in rows]})
            for split, part in (("train", rows), ("test", rows[:2])):  # a silo has to have test rows; few cost nothing
                lines = [
                    json.dumps(dict(zip(columns, row.texts, strict=True)) | {"label": silo.task.labels[row.label]})
                    for row in part
                ]
                path = folder / name / f"{split}.jsonl"
                path.parent.mkdir(exist_ok=True)
                path.write_text("\n".join(lines), encoding="utf-8")
            text = columns[0] if len(columns) == 1 else columns
            labels = list(silo.task.labels)
            ours.append({"name": name, "path": str(folder / name), "text": text, "labels": labels})
        setting = {"model": default_backbone(), "rounds": rounds, "silos": peers}
        (folder / "rows.json").write_text(json.dumps(setting), encoding="utf-8")
        config = {
            "method": {"name": "fedavg", "adapters": 1},
            "tuner": {"name": "lora", "r": 8, "alpha": 16, "sites": ["query", "value"]},
            "head": {"name": "linear", "scope": "private", "pooling": "first"},
            "rounds": rounds,
            "train": {"lr": RATE, "epochs": 1, "batch_size": BATCH, "optimizer": "adam", "max_length": LENGTH},
            "aggregation": "samples",
            "data": {"validation_rows": 0},  # else a tenth of the training rows would be held back
            "silos": [silo | {"label": "label"} for silo in ours],
        }
        (folder / "ours.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        yield folder


def run(command: Sequence[str], threads: int) -> float:
    """Run a command to its end, quietly.

    Returns:
        The largest memory of its processes together, in MiB: their Pss, looked at once a second.

    Raises:
        RuntimeError: with the end of what it said, where it fails.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        peak = 0
        while True:
            try:
                process.wait(1)
                break
            except psutil.TimeoutExpired:
                peak = max(peak, _memory(process))
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command[:4])} … failed:\n{output.read()[-3000:]}")
    return peak / 2**20


def _memory(process: psutil.Process) -> int:
    """Bytes of a process and those it has started; pages that several share count once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):  # it may have ended
            total += one.memory_full_info().pss
    return total


def compare(
    peer: str,
    repeats: int,
    threads: int,
    data: str | None,
    silos: int,
    rows: int,
    rounds: int,
    precisions: str,
    precision: str,
) -> dict[str, Any]:
    """Seconds of the peer's command at each precision and of ours, in turns; `ratio` is to the last precision named."""
    with same_rows(data, silos, rows, rounds) as folder:
        names = precisions.split(",")
        total = rounds * sum(len(silo["rows"]) for silo in json.loads((folder / "rows.json").read_text())["silos"])

        memory: dict[str, float] = {}

        def theirs(precision: str) -> None:
            memory[f"peer_{precision}"] = run(
                [sys.executable, "-m", peer, str(folder / "rows.json"), precision, str(threads)], threads
            )

        def ours() -> None:
            out = str(folder / f"run-{time.monotonic_ns()}")
            words = [f"threads={threads}", f"precision={precision}", "--out", out]
            memory["ours"] = run([sys.executable, "-m", "silotune", "run", str(folder / "ours.yaml"), *words], threads)

        work = {f"peer_{name}": (lambda name=name: theirs(name)) for name in names} | {"ours": ours}
        times = alternate(work, repeats, warm_up=0 if repeats == 1 else 1)
    report: dict[str, Any] = {"repeats": repeats, "threads": threads, "silos": silos, "rows_trained_on": total}
    for name, seconds in times.items():
        report[f"{name}_seconds"] = round(sorted(seconds)[len(seconds) // 2], 1)
        report[f"{name}_mib"] = round(memory[name])
        report[f"{name}_rows_per_second"] = round(total / sorted(seconds)[len(seconds) // 2], 1)
    for name in names[:-1]:
        report[f"over_{name}"] = ratio(times[f"peer_{name}"], times["ours"])["ratio"]
    return report | ratio(times[f"peer_{names[-1]}"], times["ours"])
