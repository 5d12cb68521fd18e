"""`silotune demo`: its tasks, and the model that one of them needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silotune.data.loading import load_silos
from silotune.lab.commands.demo import demo_config
from tests.support.command_line import Silotune
from tests.support.language_models import folder_of


@pytest.mark.parametrize("method", ["local", "ditto"])
def test_its_silos_have_one_task_and_few_rows_each(method: str) -> None:
    config = demo_config("classify", method)
    assert (config.head.scope, config.threads) == ("shared", 1)
    silos = load_silos(config)
    assert len({silo.task.name for silo in silos}) == 1
    assert all(20 <= len(silo.splits.train) <= 40 for silo in silos)
    assert len({tuple(row.texts for row in silo.splits.test) for silo in silos}) == 1


@pytest.mark.long
def test_it_chats_over_a_given_model(silotune: Silotune, tmp_path: Path) -> None:
    model = folder_of("llama", tmp_path / "models")
    outcome = silotune("demo", "--task", "chat", "--model", model, "--out", tmp_path / "out", "--quiet")
    assert outcome.code == 0
    assert "ROUGE-L" in outcome.out
    for method in ("local", "fedit", "feddpa-t"):
        summary = json.loads((tmp_path / "out" / method / "summary.json").read_text())
        assert set(summary["silos"]) == {"polite", "explain", "advice"}
    assert (tmp_path / "out/report.html").is_file()
    asked = silotune("predict", tmp_path / "out/fedit", "--silo", "polite", "--text", "Bring the menu.")
    assert asked.code == 0


@pytest.mark.long
def test_it_marks_a_sentence_of_each_hospital(silotune: Silotune, tmp_path: Path) -> None:
    outcome = silotune("demo", "--task", "entities", "--out", tmp_path / "out", "--quiet")
    assert outcome.code == 0
    assert "gazetteer" in outcome.out
    scores = {
        method: json.loads((tmp_path / "out" / method / "summary.json").read_text())["average"]
        for method in ("local", "fedavg", "ditto")
    }
    assert scores["fedavg"] > scores["local"]
    assert "[PER]" in outcome.out
