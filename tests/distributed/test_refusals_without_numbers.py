"""A refusal that depends on rows names its key; numbers of the rows stay in the silo's own log."""

from __future__ import annotations

import pytest

from tests.support.malicious import ALLOWED


def test_tokens_at_once_do_not_tell_the_longest_row(attack, capfd):
    coordinator = attack(ALLOWED, policy="lab", changes={"train__tokens_at_once": 1})
    reason = coordinator.reason("hello")
    assert reason == (
        "silo 'alpha': the run does not fit its rows (train.tokens_at_once); the numbers are in the silo's own log"
    )
    assert "train.tokens_at_once=1: a row of" in capfd.readouterr().err


@pytest.mark.parametrize("at_once", [1, 8, 31])
def test_what_decides_about_tokens_at_once_is_no_row(attack, at_once):
    """Rows of the tiny data are shorter than `train.max_length`: which of them fit would be told by the answer."""
    coordinator = attack(ALLOWED, changes={"train__tokens_at_once": at_once})
    assert f"train.tokens_at_once={at_once}; at least" in coordinator.reason("hello")


def test_room_for_a_row_of_the_largest_length_is_enough(attack):
    coordinator = attack(ALLOWED, changes={"train__tokens_at_once": 4096})
    assert coordinator.reason("hello") == ""
