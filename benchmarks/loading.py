"""Memory of loading a sharded causal language model of random weights, and of worker processes beside it.

Every figure is of processes of their own. Loading: the highest resident memory (VmHWM, reset before) minus that of the
process with its libraries, after every byte of the weights was read. Workers: the growth per process of the sum of
proportional shares (Pss in smaps_rollup) over the main process and its workers, which counts each page of the machine
once; every process has loaded the model and read all of it. Both over the bytes of the weight files. The last key is
that of loading. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from silotune.core.workers import worker_pool
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import load_backbone
from silotune.models.backbone.packages import default_backbone
from silotune.models.backbone.stored_model import weight_files
from silotune.runs.engines import multi_process

MIB = 2**20


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"), help="the weights are stored in bf16")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=3, help="the largest number of processes")


def measure(precision: str, layers: int, width: int, workers: int) -> dict[str, Any]:
    """Memory in MiB and as a multiple of the stored bytes, and seconds."""
    with tempfile.TemporaryDirectory() as directory:
        model = _in_process("make", directory, str(layers), str(width))
        files = weight_files(directory)
        stored = sum(path.stat().st_size for path in files) / MIB
        time.sleep(3)  # the fingerprint is kept for files that have settled
        first = _in_process("load", directory, precision)
        second = _in_process("load", directory, precision)
        spread = _in_process("spread", directory, precision, str(workers))["mib"]
    more = (spread[-1] - spread[0]) / (workers - 1) if workers > 1 else 0.0
    return {
        "parameters": model["parameters"],
        "shards": len(files),
        "stored_mib": round(stored, 1),
        "precision": precision,
        "libraries_mib": first["libraries"],
        "peak_over_libraries_mib": second["peak"],
        "seconds_first_start": first["seconds"],
        "seconds_second_start": second["seconds"],
        "main_and_workers_mib": spread,
        "worker_more_mib": round(more, 1),
        "worker_more_ratio": round(more / stored, 3),
        "ratio": round(max(first["peak"], second["peak"]) / stored, 3),
    }


def _in_process(*words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loading", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    if done.returncode:
        raise SystemExit(f"benchmarks loading: the process `{' '.join(words)}` ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _make(directory: str, layers: str, width: str) -> dict[str, Any]:
    """Write a LLaMA of random bf16 weights in about four shards, with the tokenizer of the offline default."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    hidden = int(width)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=int(layers),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    parameters = sum(tensor.numel() for tensor in model.parameters())
    model.save_pretrained(directory, max_shard_size=int(parameters * 2 / 3.7))
    AutoTokenizer.from_pretrained(default_backbone()).save_pretrained(directory)
    return {"parameters": parameters}


def _load(directory: str, precision: str) -> dict[str, Any]:
    import transformers

    transformers.LlamaForCausalLM.__name__, transformers.AutoTokenizer.__name__  # noqa: B018 (imports them)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before, started = _status("VmRSS"), time.perf_counter()
    backbone = _loaded(directory, precision)
    seconds = time.perf_counter() - started
    _read(backbone)
    peak = _status("VmHWM") - before
    return {"libraries": round(before, 1), "peak": round(peak, 1), "seconds": round(seconds, 2)}


def _spread(directory: str, precision: str, workers: str) -> dict[str, Any]:
    backbone = _loaded(directory, precision)
    _read(backbone)
    sizes = []
    with tempfile.TemporaryDirectory() as ready:
        for number in range(1, int(workers) + 1):
            with worker_pool(number, multi_process.IMPORTS) as pool:
                jobs = [pool.submit(_hold, directory, precision, ready, number) for _ in range(number)]
                while len(pids := [path.name for path in Path(ready).iterdir()]) < number:
                    time.sleep(0.1)
                sizes.append(round(sum(_pss(pid) for pid in ["self", *pids]), 1))
                for path in Path(ready).iterdir():
                    path.unlink()
                assert all(job.result() for job in jobs)
    return {"mib": sizes}


def _hold(directory: str, precision: str, ready: str, number: int) -> bool:
    """Load and read the model in a worker, say so, and keep it until the main process has measured."""
    backbone = load_backbone(directory, precision=precision, model_class="AutoModelForCausalLM")
    _read(backbone)
    mark = Path(ready) / str(os.getpid())
    mark.touch()
    while mark.exists():
        time.sleep(0.05)
    return True


def _loaded(directory: str, precision: str) -> Backbone:
    return load_backbone(directory, precision=precision, model_class="AutoModelForCausalLM", device="cpu")


def _read(backbone: Backbone) -> None:
    for tensor in backbone.model.parameters():
        tensor.detach().view(torch.uint8).max()


def _status(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def _pss(pid: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


if __name__ == "__main__":
    steps: dict[str, Callable[..., object]] = {"make": _make, "load": _load, "spread": _spread}
    print(json.dumps(steps[sys.argv[1]](*sys.argv[2:])))
