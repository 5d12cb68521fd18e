"""The comparison's table as files: CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silotune.core.files import write_text
from silotune.experiments.report.entries import ReportEntry
from silotune.experiments.report.scores import table_csv
from silotune.experiments.report.significance import NOTE, paired_tests
from silotune.experiments.report.tables_by_method import (
    COST_NOTE,
    ResultTable,
    as_latex,
    as_markdown,
    cost_table,
    join_tables,
    score_table,
)


def write_tables(entries: Sequence[ReportEntry], out: Path, ddof: int = 1) -> list[Path]:
    """Write `table.csv`, `table.md` and `table.tex` into a folder, each atomically.

    Args:
        entries: rows of the table.
        out: the folder.
        ddof: of the standard deviation over seeds.

    Returns:
        Paths of the three files.
    """
    scores, costs = score_table(entries, ddof), cost_table(entries)
    texts = {
        "table.csv": table_csv(entries, ddof),
        "table.md": _markdown_page(entries, scores, costs),
        "table.tex": as_latex(join_tables(scores, costs)),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def _markdown_page(entries: Sequence[ReportEntry], scores: ResultTable, costs: ResultTable) -> str:
    parts = [f"{scores.title}\n", as_markdown(scores), f"{costs.title}\n", as_markdown(costs), f"{COST_NOTE}\n"]
    tests = paired_tests(entries)
    if tests:
        lines = ["| best | against | difference (points) | pairs | p (Holm) |", "|---|---|---:|---:|---:|"]
        lines += [f"| {f.best} | {f.other} | {f.difference:+.2f} | {f.pairs} | {f.p:.3g} |" for f in tests]
        parts += ["\n".join(lines) + "\n", f"{NOTE}\n"]
    return "\n".join(parts)
