"""Write a report's tables for a terminal, Markdown, LaTeX, CSV and notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from silotune.core.files import write_text
from silotune.core.notebook import html_table
from silotune.lab.report import tables
from silotune.lab.report.entries import silo_names
from silotune.lab.report.frame import Results, Score
from silotune.lab.report.judging import NOTE, verdict_table
from silotune.lab.report.significance import beaten_by_words
from silotune.lab.report.tables import ResultTable, TableCell

if TYPE_CHECKING:
    import pandas

_LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: rf"\{letter}" for letter in "&%$#_{}"},
}


def write_tables(results: Results, out: Path) -> list[Path]:
    """Write `table.csv`, `table.md` and `table.tex` into a folder, and where there are some, verdicts and baselines."""
    scores, costs = tables.score_table(results), tables.cost_table(results)
    texts = {
        "table.csv": _csv(comparison_frame(results)),
        "table.md": _markdown_page(results, scores, costs),
        "table.tex": as_latex(_joined(scores, costs)),
    }
    if judged := verdict_table(results):
        texts |= {"verdicts.csv": _csv(_verdict_frame(judged)), "verdicts.tex": as_latex(judged)}
    if not (baselines := _baselines_frame(results)).empty:
        texts["baselines.csv"] = _csv(baselines)
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def comparison_frame(results: Results) -> pandas.DataFrame:
    """Return the rows of `table.csv` as texts: one for every method and silo, and one for each average.

    Scores are in percent. `bytes_up` is the measured total over all silos and rounds (mean over seeds). With a backdoor
    attack, two more columns have its success rate; where LoRA's factors are averaged, one more has the error of it.
    """
    import pandas

    attacked, rows = tables.any_attacked(results), []
    for entry in results.entries:
        error, shares = results.product_error(entry.label), tables.cost_shares(entry)
        costs = {
            "trainable_percent": _plain(shares.trained),
            "sent_percent": _plain(shares.sent),
            "bytes_up": _plain(entry.mean_of("bytes_up")),
        }
        for column in [*silo_names([entry]), *results.averages]:
            if (score := results.score(entry.label, column)) is not None:
                row = {"method": entry.label, "silo": column, "metric": results.metric(column, entry)}
                row |= _numbers(score) | costs
                if attacked:
                    rate = results.success_rate(entry.label, column)
                    found = _numbers(rate) if rate else {"mean": "", "std": ""}
                    row |= {"asr_mean": found["mean"], "asr_std": found["std"]}
                rows.append(row | {"product_error": "" if error is None else f"{error:.6g}"})
    columns = ["method", "silo", "metric", "mean", "std", "n", "trainable_percent", "sent_percent", "bytes_up"]
    columns += ["asr_mean", "asr_std"] if attacked else []
    averaged = any(results.product_error(entry.label) is not None for entry in results.entries)
    return pandas.DataFrame(rows, columns=[*columns, *(["product_error"] if averaged else [])])


def _baselines_frame(results: Results) -> pandas.DataFrame:
    """Return the rows of `baselines.csv` as texts: one for every baseline and silo, and one for each average."""
    import pandas

    columns = [*results.silos, *results.averages]
    rows = []
    for label in results.baselines(columns):
        for column in columns:
            if (score := results.score(label, column)) is not None:
                metric = next(metric for entry in results.entries if (metric := results.metric(column, entry)))
                rows.append({"baseline": label, "silo": column, "metric": metric} | _numbers(score))
    return pandas.DataFrame(rows)


def _verdict_frame(judged: ResultTable) -> pandas.DataFrame:
    import pandas

    _, header, rows = judged.texts()
    return pandas.DataFrame(rows, columns=header)


def _csv(frame: pandas.DataFrame) -> str:
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _numbers(score: Score) -> dict[str, str]:
    return {"mean": _plain(score.mean), "std": _plain(score.std), "n": str(score.n)}


def _plain(value: float | None) -> str:
    """Format a number with up to six decimals, without trailing zeros; whole numbers without a decimal point."""
    if value is None:
        return ""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.6f}".rstrip("0")


def _markdown_page(results: Results, scores: ResultTable, costs: ResultTable) -> str:
    notes = [f"{note}\n" for note in tables.baseline_notes(results, scores)]
    parts = [f"{scores.title}\n", as_markdown(scores), *notes]
    parts += [f"{costs.title}\n", as_markdown(costs), f"{tables.COST_NOTE}\n"]
    if judged := verdict_table(results):
        parts += [f"{judged.title}\n", as_markdown(judged), f"{NOTE}\n"]
    return "\n".join(parts)


def _joined(left_table: ResultTable, right_table: ResultTable) -> ResultTable:
    """Join two tables side by side; rows that the right one lacks (baselines) have dashes there."""
    missing = [TableCell("–")] * len(right_table.header)
    found = dict(right_table.rows)
    rows = [(label, [*left, *found.get(label, missing)]) for label, left in left_table.rows]
    return ResultTable(left_table.title, [*left_table.header, *right_table.header], rows)


def as_terminal(table: ResultTable, width: int) -> Group:
    """Render for rich: best in bold, second underlined; columns beyond the width go into further tables."""
    label_width = max(len(label) for label, _ in table.rows) + 5
    room, chunks = width - label_width, [[0]]
    for number, name in enumerate(table.header):
        needed = max(map(len, [name, *(_compact(cells[number]) for _, cells in table.rows)])) + 3
        if number and needed > room:
            chunks.append([])
            room = width - label_width
        if number:
            chunks[-1].append(number)
        room -= needed
    return Group(Text(table.title), *(_rich_table(table, chunk) for chunk in chunks))


def _compact(value: TableCell) -> str:
    return value.text.replace(" ± ", "±")


def _rich_table(result: ResultTable, columns: Sequence[int]) -> Table:
    table = Table()
    table.add_column(result.first)
    for number in columns:
        table.add_column(result.header[number], justify="right")
    styles = {1: "bold", 2: "underline"}
    for label, values in result.rows:
        cells = [(escape(_compact(values[number])), values[number].rank) for number in columns]
        table.add_row(escape(label), *(f"[{styles[rank]}]{cell}[/]" if rank else cell for cell, rank in cells))
    return table


def as_text(table: ResultTable) -> str:
    """Render as lines of equally wide columns, without the title."""
    _, header, rows = table.texts()
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for label, *cells in [header, *rows]:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([label.ljust(widths[0]), *numbers]))
    return "\n".join(lines)


def as_markdown(table: ResultTable) -> str:
    """Render as Markdown; the second is underlined by HTML, because Markdown has no underline."""
    marks = {1: "**{}**", 2: "<u>{}</u>"}
    lines = [f"| {table.first} | " + " | ".join(table.header) + " |", "|---|" + "---:|" * len(table.header)]
    for label, values in table.rows:
        cells = [marks.get(value.rank, "{}").format(value.text) for value in values]
        lines.append("| " + " | ".join([label, *cells]).replace("\n", " ") + " |")
    return "\n".join(lines) + "\n"


def as_latex(table: ResultTable) -> str:
    """Render as a LaTeX tabular (package booktabs)."""
    marks = {1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}
    head = " & ".join(_latex(name) for name in [table.first, *table.header])
    lines = [rf"\begin{{tabular}}{{l{'r' * len(table.header)}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    for label, values in table.rows:
        cells = [marks.get(value.rank, "{}").format(_latex(value.text)) for value in values]
        lines.append(rf"{' & '.join([_latex(label), *cells])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def scores_as_text(results: Results) -> str:
    """Return the title, the table, and a line for every data set on which a bag of words is better than all methods."""
    table = tables.score_table(results)
    return "\n".join([str(table.title), as_text(table), *beaten_by_words(results)])


def scores_as_html(results: Results) -> str:
    """Return the same as HTML, for a notebook."""
    remarks = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in beaten_by_words(results))
    return html_table(*tables.score_table(results).texts()) + remarks
