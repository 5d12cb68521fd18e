"""Finished runs, shared by the tests of this folder."""

from __future__ import annotations

import pytest
from small_runs import Runs

from commandline import command

__all__ = ["command"]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """See `Runs`."""
    return Runs(tmp_path_factory.mktemp("runs"))
