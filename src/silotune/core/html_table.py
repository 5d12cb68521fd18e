"""`html_table`: rows of text as the HTML table that a notebook shows."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; all texts are escaped.

    Args:
        caption: the line above the table.
        header: the columns' names.
        rows: the cells, as many as columns.
    """
    body = "".join(_row(row, "td") for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead>{_row(header, 'th')}</thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
