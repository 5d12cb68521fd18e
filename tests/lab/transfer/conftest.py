"""Finished runs, one per task and method, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import silotune
from tests.support.tiny import tiny_overrides

Made = Callable[..., Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, backbone_folder, data_folder) -> Made:
    """`made("fedavg", "alpha", "seed=2", …)` → a finished run's folder; each is made once."""
    root, runs = tmp_path_factory.mktemp("runs"), {}

    def make(method: str, task: str, *words: str) -> Path:
        if (method, task, *words) not in runs:
            folder = root / f"{len(runs)}-{method}-{task}"
            preset = [
                word for word in tiny_overrides(method, backbone_folder("bert"), data_folder) if "tasks" not in word
            ]
            setting = (
                f"data.tasks=[{task}]",
                *("partition=iid", "partition.silos=3", "head=linear", "head.scope=shared", "head.pooling=first"),
                *("tuner=lora", "train.lr=0.03", "train.steps=6", "rounds=2", "server.labels_per_class=5"),
            )
            silotune.run("demo", *preset, *setting, *words, out=folder)
            runs[method, task, *words] = folder
        return runs[method, task, *words]

    return make
