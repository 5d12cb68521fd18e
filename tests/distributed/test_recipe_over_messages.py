"""Kept optimizers, schedules over all rounds and early stopping are the same where silos are reached by messages."""

from __future__ import annotations

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from silotune.training.phase_optimizer import KEPT
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, answering, job, local_configs

RECIPE = (
    *("train.optimizer=adamw", "train.schedule=linear", "train.schedule_over=run", "train.warmup=2"),
    *("train.weight_decay=0.1", "train.clip_norm=1", "train.dropout=own", "train.keep_optimizer=true"),
    *("train.label_smoothing=0.1", "train.class_weights=balanced"),
)


def both(tiny_config, folder, *words):
    """The summaries of a run over messages and of the same run in one process."""
    config = tiny_config("fedmcp", "tuner.r=2", *words)
    configs = local_configs(config, folder / "messages")
    sent = answering(configs)
    coordinate(job(config, folder / "messages", configs), DirectLink(sent))
    return read_summary(folder / "messages"), run(config, out=folder / "process").summary


@pytest.mark.long
def test_a_whole_recipe(tiny_config, tmp_path):
    found, expected = both(tiny_config, tmp_path, *RECIPE, "rounds=2", "train.steps=3")
    assert found["shared_sha256"] == expected["shared_sha256"]
    assert found["silos"] == expected["silos"]
    for path in (tmp_path / "messages").rglob("*.safetensors"):
        kept = KEPT.encode() in path.read_bytes()
        assert kept == (path.parent.name != "checkpoints"), path  # in the silos' own folders, not in the coordinator's


@pytest.mark.long
def test_early_stopping(tiny_config, tmp_path):
    """The coordinator judges each round at once, so that no round more is trained than in one process."""
    words = ("rounds=6", "train.steps=1", "train.lr=1e-6", "train.early_stopping=2")  # nothing improves
    found, expected = both(tiny_config, tmp_path, *words)
    assert found["stopped_after"] == expected["stopped_after"] == 3
    assert found["shared_sha256"] == expected["shared_sha256"]
    rounds = [[event["round"] for event in logged(tmp_path / name, "round")] for name in ("messages", "process")]
    assert rounds == [[1, 2, 3]] * 2
