"""A place to go wrong in: a small sound federation, and the check that a command refuses as it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from commandline import Refused, Silotune, command, place, tree

__all__ = ["command", "place", "refused"]


@pytest.fixture
def refused(silotune: Silotune, place: Path) -> Refused:
    """`refused(*words, names=[…])` → the one line of a command that must end with 2 and leave every file as it was."""

    def check(*words: object, names: list[str]) -> str:
        before = tree(place)
        outcome = silotune(*words)
        assert outcome.code == 2, outcome.err
        lines = outcome.err.splitlines()
        assert len(lines) == 1, outcome.err
        assert lines[0].startswith("silotune: ")
        for name in names:
            assert name in lines[0]
        assert "Traceback" not in outcome.out
        assert tree(place) == before
        return lines[0]

    return check
