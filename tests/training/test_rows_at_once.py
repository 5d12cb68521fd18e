"""`evaluation.rows_at_once` and `generation.rows_at_once`: what is configured is used; `auto` follows the memory."""

from __future__ import annotations

import pytest

from silotune.config.parse import dump
from silotune.errors import InputError
from silotune.evaluation import predict
from silotune.evaluation.predict import Predictor
from silotune.models.heads import LanguageModelHead
from silotune.runs.build.resolve import read_config
from silotune.training import at_once
from silotune.training.at_once import rows_scored, rows_written
from tests.support.language_models import backbone_of


def config(*words):
    return read_config("demo", ["head=lm", "tuner=lora", *words])


def test_numbers_are_used_as_they_are(tiny_federation, monkeypatch):
    federation = tiny_federation("fedavg", "evaluation.rows_at_once=3")
    silo = next(iter(federation.silos.values()))
    state = federation.coordinator.shared | federation.context.state_of(silo).private
    rows = next(iter(silo.train.values()))
    seen, logits = [], Predictor.logits
    monkeypatch.setattr(Predictor, "logits", lambda *a: seen.append(len(a[1])) or logits(*a))
    predict.logits(federation.context, state, rows)
    assert max(seen) == 3
    assert sum(seen) == len(rows)


def test_auto_follows_memory_and_answers(monkeypatch):
    backbone, head = backbone_of("llama"), LanguageModelHead()
    settings = config("evaluation.rows_at_once=auto", "generation.rows_at_once=auto")
    found = []
    for memory in (2**10, 2**22, 2**23, 2**50):
        monkeypatch.setattr(at_once, "total_memory", lambda _, memory=memory: memory)
        found.append((rows_scored(settings, backbone), rows_written(settings, backbone, head)))
    assert found[0] == (1, 1)
    assert 1 < found[1][1] < found[2][1] < found[3][1] == at_once.ON_A_CPU
    assert found == sorted(found)


@pytest.mark.parametrize("key", ["evaluation.rows_at_once", "generation.rows_at_once"])
def test_other_values_are_refused(key):
    for value in ("0", "many", "true"):
        with pytest.raises(InputError, match=f"{key}: must be a number of rows"):
            config(f"{key}={value}")


def test_files_name_them():
    assert "generation:\n  rows_at_once: 8" in dump(config("generation.rows_at_once=8"))
