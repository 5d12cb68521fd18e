"""Silos whose rows have numbers, over sessions: the parts of a run in one process, and no number in any message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silotune import run
from silotune.runs.build.resolve import read_config
from tests.support.session_rig import federate

DISTINCT = 7.12345
"""A number of every row that is told by its digits."""


@pytest.fixture
def setting(tmp_path: Path, backbone_folder) -> list[str]:
    for silo in ("a", "b"):
        (tmp_path / "data" / silo).mkdir(parents=True)
        (tmp_path / "data" / silo / "meta.json").write_text('{"kind": "regression", "metric": "mse"}', encoding="utf-8")
        rows = [{"sentence1": f"the garden was warm {n}", "label": DISTINCT + n % 3} for n in range(20)]
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / "data" / silo / "train.jsonl").write_text(text, encoding="utf-8")
    data = [f"data.path={tmp_path / 'data'}", "data.tasks=[a,b]", "data.merge=true", "precision=fp32", "threads=1"]
    train = ["rounds=1", "train.steps=2", "train.batch_size=4", f"backbone={backbone_folder('bert')}"]
    return ["method=fedavg", "head=mlp", "tuner=lora", *data, *train]


def test_they_train_as_in_one_process_and_keep_their_numbers(setting: list[str], tmp_path: Path) -> None:
    summary, link = federate(read_config("", setting), tmp_path / "sessions", order=(0, 1))
    alone = run("", *setting, out=tmp_path / "alone").summary
    assert summary["shared_sha256"] == alone["shared_sha256"]
    for silo in ("a", "b"):
        assert summary["silos"][silo]["test"] == pytest.approx(alone["silos"][silo]["test"])
        assert summary["tasks"][silo]["kind"] == "regression"
    frames = b"".join(data for _, data in (*link.sent, *link.came))
    assert b"regression" in frames  # the handshake names the kind
    assert str(DISTINCT).encode() not in frames
