"""`notebook_figure`: a figure of matplotlib that a notebook shows."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def notebook_figure(width: float, height: float) -> Figure:
    """Return an empty figure that notebooks show without pyplot, of a size in inches."""
    from matplotlib.figure import Figure

    class Shown(Figure):  # a notebook draws other figures only if pyplot is loaded
        def _repr_png_(self) -> bytes:
            content = BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    return Shown(figsize=(width, height), layout="constrained")
