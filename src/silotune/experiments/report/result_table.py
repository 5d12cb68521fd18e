"""`result_table`, printed by `silotune run` and `demo`: a row per silo, a column per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from silotune.data.metrics import lower_is_better
from silotune.experiments.report.ranking import ranks

_FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "trained parameters": lambda summary: f"{summary['trainable_parameters']:,}",
    "sent parameters": lambda summary: f"{summary['sent_parameters']:,}",
    "sent by silos": lambda summary: mebibytes(summary["bytes_up"]),
    "sent to silos": lambda summary: mebibytes(summary["bytes_down"]),
}


def result_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """Make the table of test scores of runs over the same silos, with the sizes of what each trains and sends."""
    silos = list(summaries[0]["silos"])
    lower = all(lower_is_better(silo["metric"]) for silo in summaries[0]["silos"].values())
    table = Table(title=f"test score{'' if lower else ' (%)'} at the best round by validation")
    table.add_column("silo")
    for summary in summaries:
        table.add_column(summary["method"], justify="right")
    if any(summary["global"] for summary in summaries):  # all silos share one test set
        table.add_row(
            f"{len(silos)} silos, one test set", *_marked_scores([summary["average"] for summary in summaries], lower)
        )
        majority = [(summary["global"] or {}).get("majority") for summary in summaries]
        if all(score is not None for score in majority):
            table.add_row("always the most frequent label", *(f"{score:.1f}" for score in majority))
    else:
        for name in silos:
            scores = [summary["silos"][name]["test"] for summary in summaries]
            table.add_row(name, *_marked_scores(scores, lower))
        table.add_section()
        table.add_row("average", *_marked_scores([summary["average"] for summary in summaries], lower))
    if any(summary.get("attack") for summary in summaries):
        rates = [(summary.get("attack") or {}).get("asr") for summary in summaries]
        table.add_row("attack success rate", *("–" if rate is None else f"{rate:.1f}" for rate in rates))
    table.add_section()
    for fact, show in _FACTS.items():
        table.add_row(fact, *(show(summary) for summary in summaries))
    return table


def _marked_scores(scores: Sequence[float | None], lower: bool = False) -> list[str]:
    """Format scores, with best and second marked; a silo may keep its score private (None)."""
    return [_cell(score, rank) for score, rank in zip(scores, ranks(scores, lower=lower), strict=True)]


def _cell(score: float | None, rank: int) -> str:
    if score is None:
        return "–"
    style = {1: "bold", 2: "underline"}.get(rank)
    return f"[{style}]{score:.1f}[/{style}]" if style else f"{score:.1f}"


def mebibytes(size: int) -> str:
    """Format a size in bytes as MiB."""
    return f"{size / 2**20:.2f} MiB"
