"""`score_table` and `cost_table`, one row per method; for terminal, Markdown, LaTeX and HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from silotune.data.metrics import lower_is_better
from silotune.experiments.report.cost_shares import cost_shares
from silotune.experiments.report.entries import ReportEntry, distinguishable_silos, group_by_data
from silotune.experiments.report.ranking import ranks
from silotune.experiments.report.scores import AVERAGE, Score, any_attacked, mean_score, metric_name, success_rate

MOST_SILOS = 12
"""Number of silos up to which each has a column; beyond it the table has the average only (`table.csv` has all
silos)."""


@dataclass(frozen=True)
class TableCell:
    """A cell's text and its rank among rows on the same data: 1 for best, 2 for second, 0 otherwise."""

    text: str
    rank: int = 0


@dataclass(frozen=True)
class ResultTable:
    """A titled table: `header` has the names of all columns but the first; `rows` are (label, cells)."""

    title: str
    header: list[str]
    rows: list[tuple[str, list[TableCell]]]


def score_table(entries: Sequence[ReportEntry], ddof: int) -> ResultTable:
    """Make the table of test scores, mean ± std over seeds; after an attack also its success rate (ASR).

    Args:
        entries: rows of the table.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
    """
    silos = distinguishable_silos(entries)
    columns = [*(silos if len(silos) <= MOST_SILOS else []), AVERAGE]
    table = [
        ranked_cells(
            entries,
            [mean_score(entry, silo, ddof) for entry in entries],
            lower=lower_is_better(metric_name(entries[0], silo)),
        )
        for silo in columns
    ]
    if any_attacked(entries):
        columns.append("ASR")
        rates = [success_rate(entry, ddof=ddof) for entry in entries]
        table.append([TableCell("–" if rate is None else rate.text) for rate in rates])
    rows = [(entry.label, [column[number] for column in table]) for number, entry in enumerate(entries)]
    seeds = sorted({len(entry.runs) for entry in entries})
    repeats = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    repetitions = f"mean ± std over {repeats} seeds, ddof = {ddof}" if seeds[-1] > 1 else "one seed"
    ranking = "; best and second of each data set" if len(group_by_data(entries)) > 1 else ""
    return ResultTable(f"test score (%), {repetitions}{ranking}", columns, rows)


def ranked_cells(entries: Sequence[ReportEntry], scores: Sequence[Score | None], lower: bool) -> list[TableCell]:
    """Return a column's cells: each entry's score, with its rank among entries on the same data."""
    means = [score.mean if score else None for score in scores]
    column_ranks = ranks(means, [entry.evaluated_on for entry in entries], lower)
    return [
        TableCell(score.text, rank) if score else TableCell("–")
        for score, rank in zip(scores, column_ranks, strict=True)
    ]


def cost_table(entries: Sequence[ReportEntry]) -> ResultTable:
    """Make the table of trained and sent parameters, messages and seconds."""
    header = ["trained %", "adapters %", "sent %", "message %", "up MiB", "down MiB", "seconds"]
    rows = []
    for entry in entries:
        shares = cost_shares(entry)
        percents = [_percent(value) for value in (shares.trained, shares.adapters, shares.sent, shares.message)]
        sizes = [f"{entry.mean_of(key) / 2**20:.2f}" for key in ("bytes_up", "bytes_down")]
        rows.append((entry.label, [*map(TableCell, [*percents, *sizes, f"{entry.mean_of('seconds'):.0f}"])]))
    return ResultTable("trained and sent, in % of full fine-tuning; measured messages", header, rows)


COST_NOTE = (
    "Percentages are of full fine-tuning of the bare model with its head: trained parameters with heads, the adapters "
    "among them alone, sent parameters, and one silo's update as it was really serialized against all weights in "
    "float32. MiB are totals over silos and rounds, sent by silos (up) and to them (down), mean over seeds."
)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value else "0"


def join_tables(left_table: ResultTable, right_table: ResultTable) -> ResultTable:
    """Join two tables of the same rows side by side."""
    rows = [
        (label, [*left, *right]) for (label, left), (_, right) in zip(left_table.rows, right_table.rows, strict=True)
    ]
    return ResultTable(left_table.title, [*left_table.header, *right_table.header], rows)


def as_terminal(table: ResultTable, width: int) -> Group:
    """Render for rich: best in bold, second underlined; columns beyond the width go into further tables."""
    label_width = max(len(label) for label, _ in table.rows) + 5
    texts = [[name, *(_compact(values[n]) for _, values in table.rows)] for n, name in enumerate(table.header)]
    chunks: list[list[int]] = [[]]
    room = width - label_width
    for number, column in enumerate(texts):
        needed = max(map(len, column)) + 3
        if chunks[-1] and needed > room:
            chunks.append([])
            room = width - label_width
        chunks[-1].append(number)
        room -= needed
    parts = [
        ResultTable(
            table.title, [table.header[n] for n in chunk], [(label, [v[n] for n in chunk]) for label, v in table.rows]
        )
        for chunk in chunks
    ]
    return Group(Text(table.title), *map(_table, parts))


def _compact(value: TableCell) -> str:
    return value.text.replace(" ± ", "±")


def _table(result: ResultTable) -> Table:
    table = Table()
    table.add_column("method")
    for name in result.header:
        table.add_column(name, justify="right")
    styles = {1: "bold", 2: "underline"}
    for label, values in result.rows:
        cells = [escape(_compact(value)) for value in values]
        styled = [
            f"[{styles[value.rank]}]{cell}[/]" if value.rank else cell
            for cell, value in zip(cells, values, strict=True)
        ]
        table.add_row(escape(label), *styled)
    return table


def as_markdown(table: ResultTable) -> str:
    """Render as Markdown; the second is underlined by HTML, because Markdown has no underline."""
    marks = {1: "**{}**", 2: "<u>{}</u>"}
    lines = ["| method | " + " | ".join(table.header) + " |", "|---|" + "---:|" * len(table.header)]
    for label, values in table.rows:
        cells = [marks.get(value.rank, "{}").format(value.text) for value in values]
        lines.append("| " + " | ".join([label, *cells]).replace("\n", " ") + " |")
    return "\n".join(lines) + "\n"


def as_latex(table: ResultTable) -> str:
    """Render as a LaTeX tabular (package booktabs)."""
    marks = {1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}
    head = " & ".join(_latex(name) for name in ["method", *table.header])
    lines = [rf"\begin{{tabular}}{{l{'r' * len(table.header)}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    for label, values in table.rows:
        cells = [marks.get(value.rank, "{}").format(_latex(value.text)) for value in values]
        lines.append(rf"{' & '.join([_latex(label), *cells])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "–": "--",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    return "".join(special.get(letter, rf"\{letter}" if letter in "&%$#_{}" else letter) for letter in text)


def as_html(table: ResultTable) -> str:
    """Render as HTML; best and second have the classes `best` and `second`."""
    classes = {1: ' class="best"', 2: ' class="second"'}
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ["method", *table.header])
    rows = []
    for label, values in table.rows:
        cells = "".join(f"<td{classes.get(value.rank, '')}>{html.escape(value.text)}</td>" for value in values)
        rows.append(f'<tr><th scope="row">{html.escape(label)}</th>{cells}</tr>')
    return (
        f'<p class="caption">{html.escape(table.title)}</p><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
