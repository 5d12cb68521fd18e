"""The table as files: CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silotune.core.files import write_text
from silotune.experiments.report.collect import Entry
from silotune.experiments.report.scores import table_csv
from silotune.experiments.report.significance import NOTE, paired
from silotune.experiments.report.tables_by_method import COST_NOTE, cost_grid, join_tables, latex, markdown, score_grid


def write_tables(entries: Sequence[Entry], out: Path, ddof: int = 1) -> list[Path]:
    """Write `table.csv`, `table.md` and `table.tex` into a folder; each is replaced as a whole."""
    scores, costs = score_grid(entries, ddof), cost_grid(entries)
    texts = {
        "table.csv": table_csv(entries, ddof),
        "table.md": _page(entries, ddof),
        "table.tex": latex(join_tables(scores, costs)),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def _page(entries: Sequence[Entry], ddof: int) -> str:
    scores, costs = score_grid(entries, ddof), cost_grid(entries)
    parts = [f"{scores.title}\n", markdown(scores), f"{costs.title}\n", markdown(costs), f"{COST_NOTE}\n"]
    found = paired(entries)
    if found:
        lines = ["| best | against | difference (points) | pairs | p (Holm) |", "|---|---|---:|---:|---:|"]
        lines += [f"| {f.best} | {f.other} | {f.difference:+.2f} | {f.pairs} | {f.p:.3g} |" for f in found]
        parts += ["\n".join(lines) + "\n", f"{NOTE}\n"]
    return "\n".join(parts)
