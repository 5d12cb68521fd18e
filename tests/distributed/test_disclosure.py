"""What a silo may say: of its training, finite numbers under names of their own; of its scores, percents and counts."""

from __future__ import annotations

import errno
import math
import shutil

import pytest
import torch

from silotune.distributed.protocol.disclosure import validate_metrics, validate_scores
from silotune.methods.step import EVENT_KEYS, Step
from tests.support.malicious import ALLOWED

GOOD = {"loss": 0.5, "rows": 40, "steps": 4, "seconds": 1.5, "similarity_private": -0.25}


def test_a_trainings_numbers_are_taken():
    assert validate_metrics(GOOD)
    assert validate_metrics({})


@pytest.mark.parametrize(
    "bad",
    [
        *({"rows": value} for value in (math.nan, math.inf, -1, True, "3", None, 10**400)),
        *({name: 1.0} for name in ("event", "round", "silo", "note", "bytes_up", "bytes_down")),
        *({name: 1.0} for name in ("", "Loss", "a b", "x" * 41, "ünder", "a\nb")),
        {"loss": math.nan},
        {f"n{number}": 1.0 for number in range(101)},
        [("loss", 1.0)],
        None,
    ],
)
def test_anything_else_is_not(bad):
    assert not validate_metrics(GOOD | bad if isinstance(bad, dict) else bad)


ROWS = {"train": 40, "validation": 5, "test": 0}
SCORES = {"validation": 71.5, "test": 100, "rows": ROWS}


@pytest.mark.parametrize("entry", [SCORES, {}, {"validation": None}, {"test": 0.0, "rows": None}])
def test_scores_are_taken(entry):
    assert validate_scores(entry)


@pytest.mark.parametrize(
    "bad",
    [
        *({name: value} for name in ("validation", "test") for value in (-0.1, 100.5, math.nan, True, "50", [50])),
        *({name: 50} for name in ("asr", "accuracy", "metric", "sampled", "silo", "")),
        {"metric": "accuracy"},
        *({"rows": value} for value in (40, [40], {}, {"train": 40}, ROWS | {"more": 1})),
        *({"rows": ROWS | {"train": value}} for value in (-1, 1.0, True, None, "40", 10**400)),
        ["validation"],
        None,
    ],
)
def test_what_is_no_score_is_not(bad):
    assert not validate_scores(SCORES | bad if isinstance(bad, dict) else bad)


@pytest.mark.parametrize("name", sorted(EVENT_KEYS))
def test_a_methods_term_may_not_wear_the_logs_names(name):
    step = Step(None, {}, {}, {}, {}, {})
    with pytest.raises(ValueError, match=name):
        step.log(**{name: torch.tensor(1.0)})
    step.log(full=torch.tensor(2.0))
    assert step.terms["full"] == 2.0


@pytest.mark.parametrize(
    ("share", "full", "missing"),
    [([], "OSError", "its rows cannot be used"),
     (["reasons"], "OSError: no space is left on the disk", "its rows cannot be used: a file is missing")],
)  # fmt: skip
def test_why_something_failed_leaves_as_one_of_a_few_phrases_if_at_all(attack, monkeypatch, share, full, missing):
    coordinator = attack(ALLOWED, share=share)

    def write(*_, **__):
        raise OSError(errno.ENOSPC, "a row's text")

    monkeypatch.setattr(coordinator.session.store, "count", write)
    assert coordinator.reason("round") == f"{full} (see the worker's log)"
    shutil.rmtree(coordinator.settings.rows)
    coordinator.restart()
    assert coordinator.reason("round") == f"silo 'alpha': {missing} (see the worker's log)"
