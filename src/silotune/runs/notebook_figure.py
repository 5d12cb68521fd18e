"""`NotebookFigure`: a matplotlib figure that a notebook shows, whether or not pyplot is loaded."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """Is drawn as the result of a cell; otherwise a figure like any other (`savefig`, `axes`)."""

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()
