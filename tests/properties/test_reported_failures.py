"""Failures are reported: divergence, updates too large, options that a method cannot honor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silotune import InputError, SilotuneError
from silotune.runs.run import run


@pytest.mark.parametrize(
    ("words", "number", "logged"),
    [([], 1, 0), (["train.steps=1", "rounds=2"], 2, 3)],  # one step shows nothing yet
)
@pytest.mark.parametrize("method", ["local", "fedmcp"])
def test_a_run_that_diverges_ends_with_the_silo_and_the_rate(method, words, number, logged, tiny_config, tmp_path):
    """Until then the log holds finite numbers."""
    said = rf"silo '\w+', round {number}, phase 'train': training diverged.*1e\+30"
    with pytest.raises(SilotuneError, match=said) as raised:
        run(tiny_config(method, "train.lr=1e30", *words), out=tmp_path / "run")
    assert raised.value.exit_code == 1
    found = [
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} in the event log"))
        for path in tmp_path.glob("run/events.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert [event["event"] for event in found].count("silo") == logged


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_a_shared_head_is_refused_where_the_method_keeps_it(method: str, tiny_config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"head.scope=shared: method {method} keeps its heads in the silos"):
        run(tiny_config(method, "head.scope=shared", "data.tasks=[alpha]"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_backbone_of_another_precision_is_refused(tiny_federation, tiny_config, tmp_path: Path) -> None:
    backbone = tiny_federation("fedavg").backbone
    with pytest.raises(InputError, match="the one given runs in fp32, the configuration wants bf16"):
        run(tiny_config("fedavg", "precision=bf16"), out=tmp_path / "run", backbone=backbone)


def test_the_resolved_configuration_names_precision_and_threads(tiny_config, tmp_path: Path) -> None:
    finished = run(tiny_config("local", "precision=auto", "rounds=1"), out=tmp_path / "run")
    text = (finished.folder / "config.yaml").read_text()
    assert f"precision: {finished.summary['precision']}\n" in text
    assert "precision: auto" not in text
    assert f"threads: {finished.summary['threads']}\n" in text
