"""Kept optimizers, schedules over all rounds and early stopping are the same where silos are reached by messages."""

from __future__ import annotations

import pytest

from silotune.training.phase_optimizer import KEPT
from tests.support.method_cases import logged
from tests.support.session_rig import federate

RECIPE = (
    *("train.optimizer=adamw", "train.schedule=linear", "train.schedule_over=run", "train.warmup=2"),
    *("train.weight_decay=0.1", "train.clip_norm=1", "train.dropout=own", "train.keep_optimizer=true"),
    *("train.label_smoothing=0.1", "train.class_weights=balanced"),
)

pytestmark = pytest.mark.long


def test_a_whole_recipe(whole, tmp_path):
    config, expected = whole("fedmcp", "tuner.r=2", *RECIPE, "rounds=2", "train.steps=3")
    found, _ = federate(config, tmp_path / "run")
    assert found["shared_sha256"] == expected["shared_sha256"]
    assert found["silos"] == expected["silos"]
    for path in (tmp_path / "run").rglob("*.safetensors"):
        kept = KEPT.encode() in path.read_bytes()
        assert kept == (path.parent.name != "checkpoints"), path  # in the silos' own folders, not in the coordinator's


def test_early_stopping(tiny_config, in_one_process, tmp_path):
    """The coordinator judges each round at once, so that no round more is trained than in one process."""
    steps = ("rounds=6", "train.steps=1", "train.lr=1e-6", "train.early_stopping=2")  # nothing improves
    words = ("fedmcp", "tuner.r=2", *steps)
    found, _ = federate(tiny_config(*words), tmp_path / "run")
    alone = in_one_process(*words)
    assert found["stopped_after"] == alone.summary["stopped_after"] == 3
    assert found["shared_sha256"] == alone.summary["shared_sha256"]
    rounds = [[event["round"] for event in logged(folder, "round")] for folder in (tmp_path / "run", alone.folder)]
    assert rounds == [[1, 2, 3]] * 2
