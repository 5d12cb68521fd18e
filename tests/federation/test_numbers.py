"""What a silo may say of its training: finite numbers under names of their own."""

from __future__ import annotations

import math

import pytest
import torch

from silotune.engines.flower import _numbers
from silotune.methods.base import LOGGED, Step

GOOD = {"loss": 0.5, "rows": 40, "steps": 4, "seconds": 1.5, "similarity_private": -0.25}


def test_a_trainings_numbers_are_taken():
    assert _numbers(GOOD)
    assert _numbers({})


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
    assert not _numbers(GOOD | bad if isinstance(bad, dict) else bad)


@pytest.mark.parametrize("name", sorted(LOGGED))
def test_a_methods_term_may_not_wear_the_logs_names(name):
    step = Step(None, {}, {}, {}, {}, torch.Generator(), {})
    with pytest.raises(ValueError, match=name):
        step.log(**{name: torch.tensor(1.0)})
    step.log(full=torch.tensor(2.0))
    assert step.terms["full"] == 2.0
