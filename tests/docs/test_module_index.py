"""The section "Every module in one line" of docs/architecture.md is the one that the docstrings make."""

from __future__ import annotations

from tests.support.module_index import HEADING, PAGE, section


def test_the_index_is_what_the_docstrings_say() -> None:
    _, heading, text = PAGE.read_text(encoding="utf-8").partition(HEADING)
    assert heading + text == section(), "run `python -m tests.support.module_index`"


def test_every_docstring_begins_with_a_sentence() -> None:
    incomplete = [line for line in section().splitlines() if line.startswith("- ") and not line.endswith(".")]
    assert not incomplete, "a first line that is not a whole sentence"
