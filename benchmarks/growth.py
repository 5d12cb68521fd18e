"""What a federation costs as silos grow in number while few are sampled: 100 to 100,000 silos, ten a round unless told.

Ditto over LoRA on a tiny BERT, as in `silos`: every silo holds four short rows. A silo that was never sampled has no
state and no file; its rows are in memory. Each size runs in a process of its own, which first runs a small federation.

- build: processor seconds until the first round (rows, token ids, silos).
- round: processor seconds of a round, training and checkpoint included.
- memory_mib: growth of resident memory over build and rounds; files, written_mib: what the run folder holds at its end.

`exponents` are slopes of log(value) over log(silos) between the two largest sizes: 1 is linear. The last key is the
largest of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.silos import _engine, _resident, tiny_backbone

SIZES = (100, 1_000, 10_000, 100_000)
SAMPLED = 10
ROUNDS = 3


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--sampled", type=int, default=SAMPLED, help="silos of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def measure(sizes: list[int], sampled: int = SAMPLED, rounds: int = ROUNDS) -> dict[str, Any]:
    """Per size: processor seconds, memory and files; and how they grow."""
    report: dict[str, Any] = {"sampled": sampled, "rounds": rounds}
    results = []
    for size in sizes:
        words = [str(number) for number in (size, sampled, rounds)]
        ended = subprocess.run([sys.executable, "-m", "benchmarks.growth", *words], stdout=subprocess.PIPE, check=True)
        results.append(json.loads(ended.stdout))
        report[f"{size} silos"] = results[-1]
    exponents = {}
    if len(sizes) > 1:
        span = math.log(sizes[-1] / sizes[-2])
        before, after = results[-2:]
        exponents = {name: round(math.log(after[name] / before[name]) / span, 2) for name in after if before[name]}
    return report | {"exponents": exponents, "largest": max(exponents.values(), default=0.0)}


def _one(size: int, sampled: int, rounds: int) -> dict[str, Any]:
    from silotune.models.backbone.loading import load_backbone

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        source = tiny_backbone(folder / "tiny", 64, 2)
        backbone = load_backbone(source, precision="fp32")
        _engine(backbone, source, 3, 1.0, 1, folder / "warm-up").run()
        gc.collect()
        memory, started = _resident(), time.process_time()
        engine = _engine(backbone, source, size, min(1.0, sampled / size), rounds, folder / "run")
        built = time.process_time()
        engine.run()
        engine.folder.checkpoints.close()
        ended = time.process_time()
        files = [path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file()]
        return {
            "build": round(built - started, 3),
            "round": round((ended - built) / rounds, 3),
            "memory_mib": round((_resident() - memory) / 2**20, 1),
            "files": len(files),
            "written_mib": round(sum(files) / 2**20, 2),
        }


if __name__ == "__main__":
    print(json.dumps(_one(*(int(word) for word in sys.argv[1:]))))
