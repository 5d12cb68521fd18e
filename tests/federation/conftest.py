"""Small runs over sessions in this process, and short paths for sockets."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from silotune.federation import rollcall


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Nothing here takes time to arrive."""
    monkeypatch.setattr(rollcall, "POLL", 0.0)
    monkeypatch.setattr(rollcall, "LOOK", 0.0)
    monkeypatch.setattr(rollcall, "AGAIN", 0.0)


@pytest.fixture
def short():
    """A folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="st-") as folder:
        yield Path(folder)
