"""`write_tables`: a comparison's `table.csv`, `table.md` and `table.tex`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from silotune.core.files import write_text
from silotune.lab.report.baseline_rows import NOTE as BASELINE_NOTE
from silotune.lab.report.baseline_rows import baseline_rows
from silotune.lab.report.cost_shares import cost_shares
from silotune.lab.report.entries import ReportEntry, silo_names
from silotune.lab.report.scores import Score, any_attacked, average_columns, mean_score, metric_name, success_rate
from silotune.lab.report.series import mean_product_error
from silotune.lab.report.significance import NOTE, paired_tests
from silotune.lab.report.tables_by_method import (
    COST_NOTE,
    ResultTable,
    as_latex,
    as_markdown,
    cost_table,
    join_tables,
    score_table,
)

COLUMNS = ("method", "silo", "metric", "mean", "std", "n", "trainable_percent", "sent_percent", "bytes_up")

ATTACK_COLUMNS = ("asr_mean", "asr_std")

ERROR_COLUMN = "product_error"
"""Where LoRA's A and B are averaged: the error of it, a share of the mean product, mean over rounds and seeds."""


def write_tables(entries: Sequence[ReportEntry], out: Path, ddof: int = 1) -> list[Path]:
    """Write `table.csv`, `table.md`, `table.tex` and, where runs have some, `baselines.csv`, each atomically.

    Args:
        entries: rows of the table.
        out: the folder.
        ddof: the standard deviation over n seeds has the divisor n − ddof.

    Returns:
        Paths of the files.
    """
    scores, costs = score_table(entries, ddof), cost_table(entries)
    texts = {
        "table.csv": table_csv(entries, ddof),
        "table.md": _markdown_page(entries, scores, costs),
        "table.tex": as_latex(join_tables(scores, costs)),
    }
    if baselines := baselines_csv(entries, ddof):
        texts["baselines.csv"] = baselines
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def table_csv(entries: Sequence[ReportEntry], ddof: int) -> str:
    """Return `table.csv`: a row for every method and silo, and one for the average; scores in percent.

    Where silos have unlike metrics there is an average for each of them.

    `bytes_up` is the measured total over all silos and rounds (mean over seeds). With a backdoor attack, two more
    columns have its success rate; where LoRA's factors are averaged, one more has the error of it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    backdoor, averages = any_attacked(entries), average_columns(entries)
    errors = [mean_product_error(entry) for entry in entries]
    averaged = any(error is not None for error in errors)
    writer.writerow([*COLUMNS, *(ATTACK_COLUMNS if backdoor else ()), *([ERROR_COLUMN] if averaged else [])])
    for entry, error in zip(entries, errors, strict=True):
        last = ["" if error is None else f"{error:.6g}"] if averaged else []
        shares, sent = cost_shares(entry), _plain(entry.mean_of("bytes_up"))
        for silo in [*silo_names([entry]), *averages]:
            silo_score = mean_score(entry, silo, ddof)
            if silo_score is not None:
                percents = ("" if value is None else _plain(value) for value in (shares.trained, shares.sent))
                metric = metric_name(entry, silo)
                rate = _mean_and_std(success_rate(entry, silo, ddof)) if backdoor else []
                writer.writerow(
                    [entry.label, silo, metric, *_mean_and_std(silo_score), silo_score.n, *percents, sent, *rate, *last]
                )
    return text.getvalue()


def baselines_csv(entries: Sequence[ReportEntry], ddof: int) -> str:
    """Return `baselines.csv`: a row for every baseline and silo, and one for each average; empty without baselines."""
    columns = [*silo_names(entries), *average_columns(entries)]
    rows = baseline_rows(entries, columns, ddof)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("baseline", "silo", "metric", "mean", "std", "n"))
    for label, scores in rows:
        for column, baseline in zip(columns, scores, strict=True):
            if baseline is not None:
                metric = next(metric for entry in entries if (metric := metric_name(entry, column)))
                writer.writerow([label, column, metric, *_mean_and_std(baseline), baseline.n])
    return text.getvalue() if rows else ""


def _mean_and_std(score: Score | None) -> list[str]:
    """Format mean and standard deviation as two cells; empty if missing."""
    return ["", ""] if score is None else [_plain(score.mean), "" if score.std is None else _plain(score.std)]


def _plain(value: float) -> str:
    """Format a number with up to six decimals, without trailing zeros; whole numbers without a decimal point."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.6f}".rstrip("0")


def _markdown_page(entries: Sequence[ReportEntry], scores: ResultTable, costs: ResultTable) -> str:
    baselines = [f"{BASELINE_NOTE}\n"] if len(scores.rows) > len(costs.rows) else []
    parts = [f"{scores.title}\n", as_markdown(scores), *baselines]
    parts += [f"{costs.title}\n", as_markdown(costs), f"{COST_NOTE}\n"]
    tests = paired_tests(entries)
    if tests:
        lines = [
            "| best | against | difference (points) | pairs | differ | p (Holm) |",
            "|---|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {f.best} | {f.other} | {f.difference:+.2f} | {f.pairs} | {f.differing} | {f.p:.3g} |" for f in tests
        ]
        parts += ["\n".join(lines) + "\n", f"{NOTE}\n"]
    return "\n".join(parts)
