"""Show tables and figures in notebooks, with the colors and tick labels that all figures share."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = (
    *("#3d7be0", "#d96a1e", "#2a9d66", "#d1477f", "#8b62d6"),
    *("#b08a10", "#1496a8", "#d94f45", "#758a2e", "#8a8f98"),
)
"""Colors of the rows of a figure, in their order."""


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; all texts are escaped."""
    body = "".join(_row(row, "td") for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead>{_row(header, 'th')}</thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def notebook_figure(width: float, height: float) -> Figure:
    """Return an empty figure that notebooks show without pyplot, of a size in inches."""
    from matplotlib.figure import Figure

    class Shown(Figure):  # a notebook draws other figures only if pyplot is loaded
        def _repr_png_(self) -> bytes:
            content = BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    return Shown(figsize=(width, height), layout="constrained")


def wrap_label(name: str) -> str:
    """Break a name into at most two lines of 18 characters, for tick labels."""
    lines = textwrap.wrap(name, 18, max_lines=2, placeholder=" …")
    return "\n".join(lines) or name
