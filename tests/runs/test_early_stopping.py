"""`train.early_stopping`: a run ends after so many rounds without a better validation score."""

from __future__ import annotations

import pytest

from silotune.errors import InputError
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.run import run
from tests.support.method_cases import logged, same

SCORES = [50.0, 60.0, 55.0, 58.0, 59.0, 70.0]
WORDS = ("rounds=6", "train.steps=1", "train.early_stopping=2")


@pytest.fixture(autouse=True)
def _scores(monkeypatch):
    """Every round has its score, whatever was trained."""
    monkeypatch.setattr(InProcessEngine, "validate", lambda self, number: {"alpha": SCORES[number - 1]})


def test_it_ends_and_keeps_the_best_round(tiny_config, tmp_path):
    outcome = run(tiny_config("fedavg", *WORDS), out=tmp_path / "run")
    assert [event["round"] for event in logged(tmp_path / "run", "round")] == [1, 2, 3, 4]
    assert (outcome.summary["best_round"], outcome.summary["stopped_after"]) == (2, 4)
    (event,) = logged(tmp_path / "run", "stopped")
    assert event["round"] == 4
    assert "2 rounds without a better validation score" in event["reason"]
    again = run(tiny_config("fedavg", *WORDS), out=tmp_path / "run", resume=True)
    assert again.summary == outcome.summary
    assert len(logged(tmp_path / "run", "stopped")) == 1


@pytest.mark.long
def test_interrupted_it_ends_at_the_same_round(tiny_config, tmp_path):
    whole = run(tiny_config("fedavg", *WORDS), out=tmp_path / "whole").summary

    def progress(number, *_):
        if number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_config("fedavg", *WORDS), out=tmp_path / "run", progress=progress)
    assert same(run(tiny_config("fedavg", *WORDS), out=tmp_path / "run", resume=True).summary) == same(whole)


def test_not_of_methods_with_a_last_phase(tiny_config, tmp_path):
    with pytest.raises(InputError, match=r"^train.early_stopping: method fedlora is finished by its last phase"):
        run(tiny_config("fedlora", *WORDS), out=tmp_path / "run")
