"""Seconds of a round over `--engine flower-local`: three silos on one machine, each a process, over Flower.

Silos train a tiny BERT with random weights, so that nearly all of a round is the engine's own time: Flower's messages
and processes, checks, aggregation and checkpoints. `--against TREE` runs the code of another working tree in turns with
this one. The last key is this tree's median over the other's, or the median in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_WORDS = (
    *("method=fedmcp", "data.tasks=[sentiment,paraphrase,entailment]", "train.steps=2", "data.rows_per_silo=60"),
    *("evaluation.baselines=false", "threads=1", "precision=fp32"),
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's own options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--against", help="another working tree")


def measure(repeats: int, rounds: int, against: str | None) -> dict[str, Any]:
    """Return the median seconds of a round after the first, over the repeats."""
    trees = {"here": ROOT, **({"against": Path(against)} if against else {})}
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        _save_backbone(folder / "bert")
        for turn in range(repeats):
            for name, tree in trees.items():
                seconds[name].append(_round(tree, folder / "bert", folder / f"{name}-{turn}", rounds))
    report: dict[str, Any] = {name: [round(value, 3) for value in values] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return report | {"ratio": round(medians["here"] / medians.get("against", 1.0), 3)}


def _round(tree: Path, backbone: Path, out: Path, rounds: int) -> float:
    """Run the command of a working tree, and return the median seconds between the ends of its rounds."""
    command = [sys.executable, "-m", "silotune", "run", "demo", *_WORDS, f"backbone={backbone}", f"rounds={rounds}"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [*command, "--engine", "flower-local", "--out", str(out)],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    events = map(json.loads, (out / "events.jsonl").read_text(encoding="utf-8").splitlines())
    ends = [event["seconds"] for event in events if event["event"] == "round"]
    return statistics.median(later - earlier for earlier, later in pairwise(ends))


def _save_backbone(folder: Path) -> None:
    """Save a tiny BERT with the default backbone's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from silotune.models.backbone.packages import default_backbone

    tokenizer = AutoTokenizer.from_pretrained(default_backbone())
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
