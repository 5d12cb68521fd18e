"""`score_table` and `cost_table`, one row per method; for terminal, Markdown, LaTeX and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from silotune.data.metrics import lower_is_better
from silotune.lab.report.baseline_rows import baseline_rows
from silotune.lab.report.cost_shares import cost_shares
from silotune.lab.report.entries import ReportEntry, distinguishable_silos, group_by_data, rows_are_fixed
from silotune.lab.report.score_intervals import clear_winners, interval_text, score_interval
from silotune.lab.report.scores import Score, any_attacked, average_columns, mean_score, metric_name, success_rate
from silotune.lab.report.series import mean_product_error
from silotune.runs.scores import backbones_text, ranks, silo_metric

MOST_SILOS = 12
"""Number of silos up to which each has a column; beyond it the table has the average only (`table.csv` has all
silos)."""


_MOST_NAMES = 6
"""Silos of a metric that a title names."""


@dataclass(frozen=True)
class TableCell:
    """A cell of a table.

    Args:
        text: what it says.
        rank: 1 for the best of the rows on the same data, 2 for the second, 0 otherwise.
        clear: whether the score's interval lies apart from those of the other rows.
        note: what the page adds in small letters.
    """

    text: str
    rank: int = 0
    clear: bool = False
    note: str = ""


@dataclass(frozen=True)
class ResultTable:
    """A titled table.

    Args:
        title: its title.
        header: the names of all columns but the first.
        rows: (label, cells).
        first: name of the first column.
        notes: column → what the page adds to its name in small letters.
        silos: the silo of every row, of which the page's reader can choose; empty if rows are no silos.
    """

    title: str
    header: list[str]
    rows: list[tuple[str, list[TableCell]]]
    first: str = "method"
    notes: Mapping[str, str] = field(default_factory=dict)
    silos: Sequence[str] = ()

    def texts(self) -> tuple[str, list[str], list[list[str]]]:
        """Return title, names of all columns and rows as texts."""
        rows = [[label, *(cell.text for cell in cells)] for label, cells in self.rows]
        return self.title, [self.first, *self.header], rows


def score_table(entries: Sequence[ReportEntry], ddof: int) -> ResultTable:
    """Make the table of test scores, mean ± std over seeds; after an attack also its success rate (ASR).

    Args:
        entries: rows of the table.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
    """
    silos = distinguishable_silos(entries)
    columns = [*(silos if len(silos) <= MOST_SILOS else []), *average_columns(entries)]
    table = [_score_column(entries, silo, ddof) for silo in columns]
    notes = {silo: _column_note(entries, silo) for silo in columns}
    baselines = baseline_rows(entries, columns, ddof)
    if any_attacked(entries):
        columns.append("ASR")
        rates = [success_rate(entry, ddof=ddof) for entry in entries]
        table.append([TableCell("–" if rate is None else rate.text) for rate in rates])
    rows = [(entry.label, [column[number] for column in table]) for number, entry in enumerate(entries)]
    for label, scores in baselines:
        cells = [TableCell("–" if score is None else score.text) for score in scores]
        rows.append((label, cells + [TableCell("–")] * (len(columns) - len(cells))))
    seeds = sorted({len(entry.runs) for entry in entries})
    repeats = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    deviation = f"standard deviation ({'n − 1' if ddof else 'n'})"
    drawn = f"mean ± {deviation} over {repeats} seeds of {_drawn_by_seeds(entries)}"
    repetitions = drawn if seeds[-1] > 1 else "one seed"
    ranking = "; best and second of each data set" if len(group_by_data(entries)) > 1 else ""
    backbones = backbones_text(run.summary for entry in entries for run in entry.runs)
    return ResultTable(f"{_what(entries)}, {repetitions}; {backbones}{ranking}", columns, rows, notes=notes)


def _score_column(entries: Sequence[ReportEntry], silo: str, ddof: int) -> list[TableCell]:
    """Make a column of scores with ranks, intervals, and which of them is clearly the best."""
    scores = [mean_score(entry, silo, ddof) for entry in entries]
    cells = ranked_cells(entries, scores, lower=lower_is_better(metric_name(entries[0], silo)))
    intervals = [interval_text(score_interval(entry, silo)) for entry in entries]
    winners = clear_winners(entries, silo)
    return [replace(cell, clear=clear, note=text) for cell, clear, text in zip(cells, winners, intervals, strict=True)]


def _column_note(entries: Sequence[ReportEntry], column: str) -> str:
    """Return a silo's metric and number of test rows, as the first run that has the silo says; empty for averages."""
    for run in (run for entry in entries for run in entry.runs):
        if silo := run.summary["silos"].get(column):
            rows = (silo.get("rows") or {}).get("test")
            return silo_metric(run.summary, column) + ("" if rows is None else f", {rows:,} rows")
    return ""


def _what(entries: Sequence[ReportEntry]) -> str:
    """Describe the scores of a table: the metric of all silos, or those of each."""
    metrics: dict[str, list[str]] = {}
    for entry in entries:
        for name in entry.first.summary["silos"]:
            metric = silo_metric(entry.first.summary, name)
            metrics.setdefault(metric, [])
            if name not in metrics[metric]:
                metrics[metric].append(name)
    unit = "" if all(map(lower_is_better, metrics)) else " (%)"
    if len(metrics) == 1:
        return f"test {next(iter(metrics))}{unit}"
    named = "; ".join(f"{metric}: {_few(names)}" for metric, names in metrics.items())
    return f"test score{unit} by unlike metrics ({named})"


def _drawn_by_seeds(entries: Sequence[ReportEntry]) -> str:
    """Say what differs between the seeds: training alone, where `data.seed` fixes the rows, or the rows as well."""
    fixed = {rows_are_fixed(run) for entry in entries for run in entry.runs}
    return "training on the same rows" if fixed == {True} else "rows and training" if fixed == {False} else "runs"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} silos"


def ranked_cells(entries: Sequence[ReportEntry], scores: Sequence[Score | None], lower: bool) -> list[TableCell]:
    """Return a column's cells: each entry's score, with its rank among entries on the same data."""
    means = [score.mean if score else None for score in scores]
    column_ranks = ranks(means, [entry.evaluated_on for entry in entries], lower)
    return [
        TableCell(score.text, rank) if score else TableCell("–")
        for score, rank in zip(scores, column_ranks, strict=True)
    ]


def cost_table(entries: Sequence[ReportEntry]) -> ResultTable:
    """Make the table of trained and sent parameters, messages and seconds; of LoRAs also of the error of averaging."""
    errors = [mean_product_error(entry) for entry in entries]
    averaged = any(error is not None for error in errors)
    header = ["trained %", "adapters %", "sent %", "message %", "up MiB", "down MiB", "seconds"]
    rows = []
    for entry, error in zip(entries, errors, strict=True):
        shares = cost_shares(entry)
        percents = [_percent(value) for value in (shares.trained, shares.adapters, shares.sent, shares.message)]
        sizes = [f"{entry.mean_of(key) / 2**20:.2f}" for key in ("bytes_up", "bytes_down")]
        texts = [*percents, *sizes, f"{entry.mean_of('seconds'):.0f}", *([_percent_of_one(error)] if averaged else [])]
        rows.append((entry.label, [*map(TableCell, texts)]))
    header += ["product error %"] if averaged else []
    return ResultTable("trained and sent, in % of full fine-tuning; measured messages", header, rows)


COST_NOTE = (
    "Percentages are of full fine-tuning of the bare model with its head: trained parameters with heads, the adapters "
    "among them alone, sent parameters, and one silo's update as it was really serialized against all weights in "
    "float32. MiB are totals over silos and rounds, sent by silos (up) and to them (down), mean over seeds. Product "
    "error: how far the aggregate's B·A is from the mean of the silos' B·A, in % of that mean, over rounds and seeds; "
    "–: no pair of LoRA's factors was averaged."
)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value else "0"


def _percent_of_one(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"


def join_tables(left_table: ResultTable, right_table: ResultTable) -> ResultTable:
    """Join two tables side by side; rows that the right one lacks (baselines) have dashes there."""
    missing = [TableCell("–")] * len(right_table.header)
    found = dict(right_table.rows)
    rows = [(label, [*left, *found.get(label, missing)]) for label, left in left_table.rows]
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
