"""The papers' parameter tables: which differences are explained, and the document made of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.paper_tables import PaperRow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """The module of the tables, which estimates each configuration once for all tests here."""
    from benchmarks import paper_tables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_tables, "estimate", cache(paper_tables.estimate))
        yield paper_tables


@pytest.fixture(scope="module")
def rows(tables: ModuleType) -> dict[tuple[str, str], PaperRow]:
    return {(row.claim.where, row.claim.what): row for row in tables.paper_rows()}


def test_differences_above_one_percent_are_explained_and_others_are_not(rows: dict[tuple[str, str], PaperRow]) -> None:
    from benchmarks.paper_tables import LIMIT

    assert LIMIT == 1
    for row in rows.values():
        assert (abs(row.value / row.claim.printed - 1) > 0.01) == bool(row.explained), row.claim.what


def test_fedmcp_trains_what_fedavg_trains_and_sends_exactly_half(rows: dict[tuple[str, str], PaperRow]) -> None:
    fedmcp, fedavg = rows["Table I", "FedMCP, trained"].cost, rows["Table I", "FedAvg (PEFT), trained"].cost
    assert fedmcp.adapter_parameters == fedavg.adapter_parameters
    assert 2 * fedmcp.sent_parameters == fedavg.sent_parameters


@pytest.mark.usefixtures("tables")
def test_the_document_is_the_commands_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.__main__ import main

    monkeypatch.setattr(sys, "argv", ["benchmarks", "paper-tables"])
    assert main() == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "results" / "parameters.md").read_text("utf-8")
