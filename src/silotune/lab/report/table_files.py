"""Write a report's tables for a terminal, Markdown, LaTeX, CSV and notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from silotune.cli.console import new_table
from silotune.core.files import write_text
from silotune.core.notebook import html_table
from silotune.lab.report import tables
from silotune.lab.report.alarms import alarms
from silotune.lab.report.entries import silo_names
from silotune.lab.report.frame import MeanScore, Results
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
    "→": r"$\rightarrow$",
    "↓": r"$\downarrow$",
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
        texts |= {"verdicts.csv": _csv(judged.frame()), "verdicts.tex": as_latex(judged)}
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

    rows = []
    for entry in results.entries:
        error, shares = results.product_error(entry.label), tables.cost_shares(entry)
        costs = {"trainable_percent": _plain(shares["trained"]), "sent_percent": _plain(shares["sent"])}
        costs["bytes_up"] = _plain(entry.mean_of("bytes_up"))
        costs["product_error"] = "" if error is None else f"{error:.6g}"
        for column in [*silo_names([entry]), *results.averages]:
            if (score := results.score(entry.label, column)) is not None:
                row = {"method": entry.label, "silo": column, "metric": results.metric(column, entry)}
                rate = _numbers(results.success_rate(entry.label, column))
                rows.append(row | _numbers(score) | costs | {f"asr_{key}": text for key, text in rate.items()})
    columns = ["method", "silo", "metric", "mean", "std", "n", "trainable_percent", "sent_percent", "bytes_up"]
    columns += ["asr_mean", "asr_std"] if tables.any_attacked(results) else []
    columns += ["product_error"] if any(row["product_error"] for row in rows) else []
    return pandas.DataFrame(rows, columns=columns)


def _baselines_frame(results: Results) -> pandas.DataFrame:
    """Return the rows of `baselines.csv` as texts: one for every baseline and silo, and one for each average."""
    import pandas

    columns = [*results.silos, *results.averages]
    entries = results.entries
    metrics = {name: next(filter(None, (results.metric(name, entry) for entry in entries)), "") for name in columns}
    rows = [
        {"baseline": label, "silo": column, "metric": metrics[column]} | _numbers(score)
        for label in results.baselines(columns)
        for column in columns
        if (score := results.score(label, column)) is not None
    ]
    return pandas.DataFrame(rows)


def _csv(frame: pandas.DataFrame) -> str:
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _numbers(score: MeanScore | None) -> dict[str, str]:
    if score is None:
        return dict.fromkeys(("mean", "std", "n"), "")
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
    parts += [f"**Alarm.** {line}\n" for line in alarms(results)]
    return "\n".join(parts)


def _joined(left_table: ResultTable, right_table: ResultTable) -> ResultTable:
    """Join two tables side by side; rows that the right one lacks (baselines) have dashes there."""
    missing = [TableCell("–")] * len(right_table.header)
    right = dict(right_table.rows)
    rows = [(label, [*left, *right.get(label, missing)]) for label, left in left_table.rows]
    return ResultTable(left_table.title, [*left_table.header, *right_table.header], rows)


def as_terminal(table: ResultTable) -> Group:
    """Render for rich: best in bold, second underlined."""
    grid, marks = new_table(None, [table.first], table.header), {1: "[bold]{}[/]", 2: "[underline]{}[/]"}
    for label, values in table.rows:
        grid.add_row(escape(label), *(cell.replace(" ± ", "±") for cell in _marked(values, marks, escape)))
    return Group(Text(table.title), grid)


def _marked(cells: Sequence[TableCell], marks: Mapping[int, str], escape: Callable[[str], str] = str) -> list[str]:
    """Return the texts of cells with the mark of their rank."""
    return [marks.get(cell.rank, "{}").format(escape(cell.text)) for cell in cells]


def as_markdown(table: ResultTable) -> str:
    """Render as Markdown; the second is underlined by HTML, because Markdown has no underline."""
    lines = [f"| {table.first} | " + " | ".join(table.header) + " |", "|---|" + "---:|" * len(table.header)]
    for label, cells in table.rows:
        texts = [label, *_marked(cells, {1: "**{}**", 2: "<u>{}</u>"})]
        lines.append("| " + " | ".join(texts).replace("\n", " ") + " |")
    return "\n".join(lines) + "\n"


def as_latex(table: ResultTable) -> str:
    """Render as a LaTeX tabular (package booktabs)."""
    head = " & ".join(_latex(name) for name in [table.first, *table.header])
    lines = [rf"\begin{{tabular}}{{l{'r' * len(table.header)}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    for label, cells in table.rows:
        texts = [_latex(label), *_marked(cells, {1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}, _latex)]
        lines.append(rf"{' & '.join(texts)} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def scores_as_text(results: Results) -> str:
    """Return the title, the table, and a line for every data set on which a bag of words is better than all methods."""
    table = tables.score_table(results)
    return "\n".join([table.title, table.frame().to_string(index=False), *beaten_by_words(results)])


def scores_as_html(results: Results) -> str:
    """Return the same as HTML, for a notebook."""
    remarks = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in beaten_by_words(results))
    return as_html(tables.score_table(results)) + remarks


def as_html(table: ResultTable) -> str:
    """Render for a notebook."""
    frame = table.frame()
    return html_table(table.title, list(frame), frame.to_numpy().tolist())
