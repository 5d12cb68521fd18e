"""Make the table that `silotune run` and `demo` print: a row per silo, a column per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from silotune.cli.console import WholeTable, new_table
from silotune.data.kinds import KINDS
from silotune.data.tasks import lower_is_better, metric_title
from silotune.runs.scores import (
    AVERAGE,
    backbones_text,
    baseline_of,
    baseline_titles,
    metrics_of,
    ranks,
    score_of,
    silo_metric,
)

_FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "trained parameters": lambda summary: f"{summary['trainable_parameters']:,}",
    "sent parameters": lambda summary: f"{summary['sent_parameters']:,}",
    "sent by silos": lambda summary: mebibytes(summary["bytes_up"]),
    "sent to silos": lambda summary: mebibytes(summary["bytes_down"]),
}


def result_table(summaries: Sequence[dict[str, Any]]) -> WholeTable:
    """Make the table of test scores of several runs over the same silos, with what each run trains and sends.

    It names every silo's metric, in the title where there is one for all, and has the scores of the baselines. A single
    run has a column of 95 % intervals.
    """
    first = summaries[0]
    silos, metrics = list(first["silos"]), metrics_of(first)
    lower = all(map(lower_is_better, metrics))
    titles = {silo_metric(first, silo) for silo in silos}
    measure = "score" if len(titles) > 1 else titles.pop()
    what = f"test {measure}{'' if lower else ' (%)'} at the best round by validation"
    more = _columns_beside(first) if len(summaries) == 1 else _baseline_columns(first)
    numbers = (*(summary["method"] for summary in summaries), *more)
    title = escape(f"{what}; {backbones_text(summaries)}")
    table = new_table(title, ("silo", "metric") if measure == "score" else ["silo"], numbers)

    def row(label: str, metric: str, *cells: str) -> None:
        table.add_row(label, *([escape(metric)] if measure == "score" else []), *cells)

    def add(label: str, metric: str, scores: Sequence[float | None], column: str) -> None:
        ranked = zip(scores, ranks(scores, lower=lower), strict=True)
        row(label, metric, *(_cell(*pair) for pair in ranked), *(read(column) for read in more.values()))

    if any(summary["global"] for summary in summaries):  # all silos share one test set
        metric = silo_metric(first, silos[0])
        add(f"{len(silos)} silos, one test set", metric, [summary["average"] for summary in summaries], AVERAGE)
        majority = [(summary["global"] or {}).get("majority") for summary in summaries]
        if all(score is not None for score in majority):
            constant = KINDS[(first.get("tasks") or {}).get(silos[0], {}).get("kind", "classification")].constant
            row(f"always {constant}", metric, *(f"{score:.1f}" for score in majority))
    else:
        for name in silos:
            add(name, silo_metric(first, name), [summary["silos"][name]["test"] for summary in summaries], name)
        table.add_section()
        for metric in metrics:
            column = AVERAGE if len(metrics) == 1 else f"{AVERAGE} {metric}"
            scores = [score_of(summary, column) for summary in summaries]
            add("average", metric_title(metric), scores, column)
    if any(summary.get("attack") for summary in summaries):
        rates = [(summary.get("attack") or {}).get("asr") for summary in summaries]
        row("attack success rate", "", *("–" if rate is None else f"{rate:.1f}" for rate in rates))
    table.add_section()
    for fact, show in _FACTS.items():
        row(fact, "", *(show(summary) for summary in summaries))
    return table


def _baseline_columns(summary: Mapping[str, Any]) -> dict[str, Callable[[str], str]]:
    """Return the columns of the baselines that a run has: title → function from silo or average to cell."""
    baselines = summary.get("baselines") or {}
    keys = {key for scores in [*baselines.get("silos", {}).values(), baselines.get("global") or {}] for key in scores}
    return {title: _baseline_cells(summary, key) for key, title in baseline_titles().items() if key in keys}


def _baseline_cells(summary: Mapping[str, Any], key: str) -> Callable[[str], str]:
    return lambda column: _cell(baseline_of(summary, column, key), 0)


def _columns_beside(summary: Mapping[str, Any]) -> dict[str, Callable[[str], str]]:
    """Return the columns beside a single run's scores: intervals over test rows, and the baselines."""
    intervals = summary.get("intervals") or {}

    def interval(column: str) -> str:
        bounds = intervals.get("global") if column == AVERAGE else intervals.get("silos", {}).get(column)
        return "–" if bounds is None else f"{bounds[0]:.1f} to {bounds[1]:.1f}"

    known = any(value is not None for value in [intervals.get("global"), *intervals.get("silos", {}).values()])
    return ({"95 % interval": interval} if known else {}) | _baseline_columns(summary)


def _cell(score: float | None, rank: int) -> str:
    """Format a score, with best and second marked; a silo may keep its score private (None)."""
    if score is None:
        return "–"
    style = {1: "bold", 2: "underline"}.get(rank)
    return f"[{style}]{score:.1f}[/{style}]" if style else f"{score:.1f}"


def mebibytes(size: int) -> str:
    """Format a size in bytes as MiB."""
    return f"{size / 2**20:.2f} MiB"
