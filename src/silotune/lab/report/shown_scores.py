"""`scores_as_text` and `scores_as_html`: the table of scores that Python and notebooks show, with its remarks."""

from __future__ import annotations

import html
from collections.abc import Sequence

from silotune.core.notebook import html_table
from silotune.lab.report.baseline_rows import beaten_by_words
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.tables_by_method import as_text, score_table


def scores_as_text(entries: Sequence[ReportEntry], ddof: int) -> str:
    """Return the title, the table, and a line for every task on which a bag of words is better than all methods.

    Args:
        entries: the rows of the table.
        ddof: the standard deviation over n seeds has the divisor n − ddof.
    """
    table = score_table(entries, ddof)
    return "\n".join([str(table.title), as_text(table), *beaten_by_words(entries)])


def scores_as_html(entries: Sequence[ReportEntry], ddof: int) -> str:
    """Return the same as HTML, for a notebook."""
    remarks = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in beaten_by_words(entries))
    return html_table(*score_table(entries, ddof).texts()) + remarks
