"""A run that was killed while it dropped a superseded checkpoint finishes that when it is resumed."""

from __future__ import annotations

import torch

from silotune.runs.storage.checkpoints import Checkpoint, Checkpoints


def test_older_files_go_and_newer_and_needed_ones_stay(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    tensors = {"x": torch.zeros(2)}
    names = [
        "shared-0001",
        "shared-0002",
        "shared-0003",
        *(f"silos/a/{n}" for n in ("0001", "0002", "0003-final", "0004")),
    ]
    for name in names:
        checkpoints.write(name, tensors)
    last = Checkpoint(3, "shared-0003.safetensors", {"a": "silos/a/0003-final.safetensors"}, {})
    best = Checkpoint(1, "shared-0001.safetensors", {"a": "silos/a/0001.safetensors"}, {})
    checkpoints.close()
    for number in (1, 2, 3):
        (checkpoints.path / f"round-{number:04d}.json").write_text("{}")
    checkpoints.drop_older(last, best)
    left = sorted(
        path.relative_to(checkpoints.path).as_posix() for path in checkpoints.path.rglob("*") if path.is_file()
    )
    newer = "silos/a/0004.safetensors"
    assert left == sorted({*last.files, *best.files, newer, "round-0001.json", "round-0003.json"})
