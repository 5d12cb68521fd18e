"""docs/configuration.md is the page that the schema makes."""

from __future__ import annotations

from scripts.configuration_page import PAGE, page


def test_the_page_is_what_the_schema_says() -> None:
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "run `python -m scripts.configuration_page`"
    incomplete = [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert not incomplete, "keys without a meaning"
