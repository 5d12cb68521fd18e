"""From the command to the end of the first training step: `silotune run` as a user starts it, a process each time.

`SILOTUNE_TREE=FOLDER` measures the code of another working tree. Processor time (`cpu`) says more than seconds where
other work is on the machine.

The command runs as it is; the first optimizer step of the process notes the time and ends it. The first run, which may
have to fetch files from the disk, does not count. Parts: `import_torch` and `import_transformers` are what these two
take of it, in processes of their own. The last key is the median in seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_CHILD = """
import os, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
def first(optimizer, args, kwargs):
    os.write(int(os.environ["SILOTUNE_FIRST_STEP"]), f"{time.monotonic()} {time.process_time()}".encode())
    os._exit(0)
register_optimizer_step_post_hook(first)
from silotune.cli.main import main
sys.argv = ["silotune", *sys.argv[1:]]
main()
"""


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--source", default="demo", help="a preset or a YAML file")
    parser.add_argument("words", nargs="*", help="key=value …")


def measure(repeats: int, source: str, words: list[str]) -> dict[str, Any]:
    """Seconds to the first step, and to import what it needs."""
    both = [_first_step(source, words) for _ in range(repeats + 1)][1:]
    seconds, cpu = [turn[0] for turn in both], [turn[1] for turn in both]
    report: dict[str, Any] = {"command": " ".join(["silotune run", source, *words]), "repeats": repeats}
    for library in ("torch", "transformers"):
        report[f"import_{library}"] = round(statistics.median(_import(library) for _ in range(3)), 2)
    report |= {"cpu_min": round(min(cpu), 2), "cpu": round(statistics.median(cpu), 2)}
    report |= {"seconds_min": round(min(seconds), 2), "seconds_max": round(max(seconds), 2)}
    return report | {"ratio": round(statistics.median(seconds), 2)}


def _first_step(source: str, words: list[str]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a command until its first step."""
    import os

    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", _CHILD, "run", source, *words, "--out", str(Path(directory) / "run")]
        environment = os.environ | {"SILOTUNE_FIRST_STEP": str(write), "HF_HUB_OFFLINE": "1"}
        if tree := os.environ.get("SILOTUNE_TREE"):
            environment["PYTHONPATH"] = str(Path(tree) / "src")
        started = time.monotonic()
        ended = subprocess.run(command, pass_fds=(write,), env=environment, stdout=subprocess.DEVNULL, check=False)
        os.close(write)
        with os.fdopen(read) as pipe:
            message = pipe.read()
    if ended.returncode or not message:
        raise SystemExit(f"benchmarks startup: the command ended with {ended.returncode} before a step")
    ended_at, cpu = map(float, message.split())
    return ended_at - started, cpu


def _import(library: str) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {library}"], check=True)
    return time.monotonic() - started
