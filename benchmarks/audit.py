"""Audit noise on rows: canaries guessed from a model at ε = 1, and from one whose noise and clipping are silently off.

One silo of 64 made rows and 500 canaries with eight labels trains LoRA and a head on the default backbone. In the first
run everything is as configured; in the second the account is the same, and neither noise nor clipping is there. The
lower bound has to be below the account's ε in the first and above it in the second. The last key is the second one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from silotune.runs.build.resolve import read_config
from silotune.runs.release import Release, measure_release
from silotune.runs.run import run
from silotune.training import noised_steps
from silotune.training.row_privacy import RowPrivacy

ROWS, LABELS = 64, 8

WORDS = (
    *(
        "method=fedavg",
        "tuner=lora",
        "tuner.r=16",
        "head=mlp",
        "head.pooling=mean",
        "rounds=1",
        "data.validation_rows=0",
    ),
    *("train.lr=0.003", "train.batch_size=64", "evaluation.baselines=false", "privacy.unit=row", "privacy.epsilon=1"),
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's own options."""
    parser.add_argument("--canaries", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=30)


def measure(canaries: int, epochs: int) -> dict[str, Any]:
    """Return both runs' bounds."""
    words = [*WORDS, f"audit.canaries={canaries}", f"train.epochs={epochs}"]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        source = _made_rows(folder)
        releases = {"as configured": _release(source, words, folder / "one")}
        unclipped = noised_steps.clipped_sum

        def loose(vectors: Any, bound: float, grid: float) -> Any:
            return unclipped(vectors, bound * 2.0**20, grid * 2.0**20) * 2**20

        with mock.patch.object(noised_steps, "clipped_sum", loose), mock.patch.object(RowPrivacy, "deviation", _none):
            releases["noise and clipping off"] = _release(source, words, folder / "two")
    report: dict[str, Any] = {name: release.fields() for name, release in releases.items()}
    off = releases["noise and clipping off"].canaries
    assert off is not None, "the runs have canaries"
    return report | {"ratio": off.lower}


def _none(*_: object) -> float:
    return 0.0


def _release(source: Path, words: list[str], out: Path) -> Release:
    run(read_config(str(source), words), out=out)
    measured = measure_release(out, "north")
    for line in measured.lines():
        print(line, file=sys.stderr, flush=True)
    return measured


def _made_rows(folder: Path) -> Path:
    """Write the silo's rows and its configuration."""
    rows = [{"text": f"a plain note with number {n}", "label": f"kind {n % LABELS}"} for n in range(2 * ROWS)]
    for split, part in (("train", rows[:ROWS]), ("test", rows[ROWS:])):
        target = folder / "north" / f"{split}.jsonl"
        target.parent.mkdir(exist_ok=True)
        target.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    labels = [f"kind {n}" for n in range(LABELS)]
    source = folder / "audit.yaml"
    tree = {"silos": [{"name": "north", "path": str(folder / "north"), "labels": labels}]}
    source.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return source
