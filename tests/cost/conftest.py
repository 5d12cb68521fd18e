"""The command line, and configurations as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def config_file(tmp_path):
    """`config_file(model_type="bert", hidden_size=32, …)` → the path of a config.json."""

    def write(**fields: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        return path

    return write
