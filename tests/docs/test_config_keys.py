"""src/silotune/config/keys.py is the module that the schema makes."""

from __future__ import annotations

from scripts.config_keys import MODULE, module


def test_the_types_are_those_of_the_schema() -> None:
    assert MODULE.read_text(encoding="utf-8") == module(), "run `python -m scripts.config_keys`"
