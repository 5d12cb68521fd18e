"""Here models are read, each time."""

from __future__ import annotations

import pytest

from silotune.models.backbone import loading
from tests.support.tiny import ReadOnce


@pytest.fixture(autouse=True)
def _models_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(loading._read, ReadOnce):
        monkeypatch.setattr(loading, "_read", loading._read._read)
