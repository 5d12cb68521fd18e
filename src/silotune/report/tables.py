"""The table people compare: one row a method, one column a silo, best in bold, second underlined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def result_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """Test scores of runs over the same silos, with what each trains and sends."""
    silos = list(summaries[0]["silos"])
    table = Table(title="test score in percent, at the best round by validation")
    table.add_column("method")
    for name in (*silos, "average"):
        table.add_column(name, justify="right")
    for name in ("trained", "sent", "up", "down"):
        table.add_column(name, justify="right")
    scores = [[summary["silos"][name]["test"] for name in silos] + [summary["average"]] for summary in summaries]
    for row, summary in enumerate(summaries):
        cells = [_marked([line[column] for line in scores], row) for column in range(len(silos) + 1)]
        table.add_row(
            summary["method"],
            *cells,
            f"{summary['trainable_parameters']:,}",
            f"{summary['sent_parameters']:,}",
            mebibytes(summary["bytes_up"]),
            mebibytes(summary["bytes_down"]),
        )
    return table


def _marked(column: list[float], row: int) -> str:
    text = f"{column[row]:.1f}"
    ranks = sorted({round(value, 6) for value in column}, reverse=True)
    if len(column) > 1 and round(column[row], 6) == ranks[0]:
        return f"[bold]{text}[/bold]"
    if len(ranks) > 1 and round(column[row], 6) == ranks[1]:
        return f"[underline]{text}[/underline]"
    return text


def mebibytes(size: int) -> str:
    """A size for reading."""
    return f"{size / 2**20:.2f} MiB"
