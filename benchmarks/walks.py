"""How many of our files two everyday walks go through: a measure of what a reader has to open.

A file counts if one of its functions was called, other than by an import. The walks are `silotune predict` of one text,
from the command to the answer, and a batch of FedMCP, from the function that trains a phase to the backward pass.
`--tree FOLDER` counts another working tree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_COUNT = """
import json, os, sys
import torch
files, on = set(), False
def note(frame, event, argument):
    global on
    code = frame.f_code
    if event != "call" or "/silotune/" not in code.co_filename:
        return
    if code.co_name == os.environ["SILOTUNE_WALK_BEGIN"]:
        on = True
    if on and code.co_flags & 1 and not code.co_name.startswith("<") and not importing(frame):
        files.add(code.co_filename.split("/silotune/", 1)[1])
def importing(frame):
    while frame := frame.f_back:
        if frame.f_code.co_name == "<module>" and "/silotune/" in frame.f_code.co_filename:
            return True
    return False
def ended(*arguments, **options):
    report()
def report():
    global on
    sys.setprofile(None)
    with open(os.environ["SILOTUNE_WALK_FILES"], "w") as file:
        json.dump(sorted(files), file)
    os._exit(0)
if os.environ["SILOTUNE_WALK_END"] == "backward":
    torch.autograd.backward = torch.Tensor.backward = ended
from silotune.cli.main import main
sys.argv = ["silotune", *sys.argv[1:]]
sys.setprofile(note)
try:
    main()
finally:
    report()
"""
"""Runs a command, and writes the files whose functions are called after the function SILOTUNE_WALK_BEGIN."""

_RUN = ("demo", "method=fedmcp", "rounds=1", "train.steps=1", "data.rows_per_silo=40", "evaluation.baselines=false")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's own options."""
    parser.add_argument("--tree", default=str(ROOT), help="a working tree")
    parser.add_argument("--begin", default="_train_phase", help="the function that trains a phase")


def measure(tree: str, begin: str) -> dict[str, Any]:
    """Return the number of files of each walk, and their names."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        environment = os.environ | {"PYTHONPATH": str(Path(tree) / "src"), "HF_HUB_OFFLINE": "1"}
        train = [sys.executable, "-m", "silotune", "run", *_RUN, "--out", str(run)]
        subprocess.run(train, env=environment, stdout=subprocess.DEVNULL, check=True)
        predict = ["predict", str(run), "--silo", "sentiment", "--text", "It was worth the wait."]
        predicted = _files(tree, Path(directory), predict, "main", "exit")
        batch = _files(tree, Path(directory), ["run", *_RUN, "--out", str(run) + "-2"], begin, "backward")
    return {"predict": len(predicted), "predict_files": predicted, "batch": len(batch), "batch_files": batch}


def _files(tree: str, folder: Path, words: list[str], begin: str, end: str) -> list[str]:
    """Return the files that a command goes through."""
    names = folder / "files.json"
    environment = os.environ | {
        "PYTHONPATH": str(Path(tree) / "src"),
        "HF_HUB_OFFLINE": "1",
        "SILOTUNE_WALK_BEGIN": begin,
        "SILOTUNE_WALK_END": end,
        "SILOTUNE_WALK_FILES": str(names),
    }
    subprocess.run([sys.executable, "-c", _COUNT, *words], env=environment, stdout=subprocess.DEVNULL, check=False)
    files: list[str] = json.loads(names.read_text(encoding="utf-8"))
    return files
