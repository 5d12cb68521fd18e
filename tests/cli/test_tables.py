"""Tables of the command line in a narrow terminal: nothing is cut, so that no two rows are alike."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from silotune.cli.console import new_table
from silotune.cli.result_table import result_table
from silotune.lab.report.table_files import as_terminal
from silotune.lab.report.tables import plain_table
from tests.support.report_runs import write_run

NAMES = ["fedmcp-private-with-noise-on-rows", "fedmcp-private-with-noise-on-sums", "fedprompt-clip-0.5, train.lr=0.01"]


def columns_of(renderable: object, width: int) -> list[str]:
    """Print, and return the texts of each column one after another, with those of further tables; without spaces."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    found: dict[tuple[int, int], str] = {}
    tables = 0
    for line in text.splitlines():
        tables += line.startswith("┏")
        if line[:1] in "┃│":
            for place, cell in enumerate(line[1:-1].replace("┃", "│").split("│")):
                found[tables, place] = found.get((tables, place), "") + cell.replace(" ", "")
    return [*found.values()]


def assert_whole(columns: list[str], texts: list[str]) -> None:
    missing = [text for text in texts if not any(text.replace(" ", "") in column for column in columns)]
    assert not missing


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_and_numbers_are_whole(width: int) -> None:
    numbers = ("rounds", "silos", "trained parameters", "sent a round")
    table = new_table("what would run", ("entry", "seeds"), numbers)
    for place, name in enumerate(NAMES):
        table.add_row(name, "1, 2, 3, 4, 5", "100", "1,000", f"10,109,350,14{place}", "300,862")
    columns = columns_of(table, width)
    texts = [*NAMES, "1, 2, 3, 4, 5", *numbers, "10,109,350,140", "10,109,350,142", "300,862"]
    assert_whole(columns, texts)
    if width == 200:
        assert len(columns) == 6


def test_columns_beyond_the_width_follow_below_with_the_rows_names() -> None:
    scores = {f"silo-{number}": f"7{number}.31 ± 12.50" for number in range(9)}
    columns = columns_of(as_terminal(plain_table("scores", [(name, scores) for name in NAMES])), 80)
    assert_whole(columns, [*scores, *(score.replace(" ", "") for score in scores.values())])
    named = [column for column in columns if column.startswith("method")]
    assert len(named) > 1
    for column in named:
        assert_whole([column], NAMES)


def test_the_demo_s_table_is_whole_at_80_columns(tmp_path: Path) -> None:
    silos = {"duplicate_question": 60.0, "sentiment": 61.0}
    methods = ("local", "fedavg", "ditto")
    summaries = []
    for method in methods:
        summary = json.loads((write_run(tmp_path / method, method, 1, silos) / "summary.json").read_text())
        summary |= {"trainable_parameters": 300_866, "bytes_up": 41 * 2**20}
        summary["baselines"] = {"silos": {name: {"outside": 40.0, "gazetteer": 55.0} for name in silos}}
        summaries.append(summary)
    columns = columns_of(result_table(summaries), 80)
    assert_whole(columns, [*silos, *methods, "300,866", "41.00 MiB", "nothing marked", "gazetteer"])
