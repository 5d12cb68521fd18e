"""`Panel`, `Mark` and `FigureSpec` describe figures; matplotlib renders inline SVG, or PNG and SVG files."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silotune.core.notebook import COLORS, notebook_figure, wrap_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Placeholders that `panel_svg` replaces by CSS variables, so that one SVG serves light and dark themes.
INK, GRID = "#1a2b3c", "#c9d0d8"

_VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"}


MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

_PANEL = (3.9, 2.9)  # inches; about 375 pixels on the page


@dataclass(frozen=True)
class Mark:
    """A value of a diagram that the page names when the pointer is near it.

    Args:
        x: in units of the x axis.
        y: in units of the y axis.
        text: what it is.
    """

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Args:
        title: its title.
        x: label of the x axis.
        y: label of the y axis.
        draw: draws the data on axes and returns its values; `panel_svg` and `save_figure` add titles and labels.
        height: inches.
        width: inches.
        silo: the silo that it is about; empty if about several. The page's reader can choose silos.
    """

    title: str
    x: str
    y: str
    draw: Callable[[Axes], Sequence[Mark]]
    height: float = _PANEL[1]
    width: float = _PANEL[0]
    silo: str = ""


@dataclass(frozen=True)
class FigureSpec:
    """A figure of the report; its panels share one legend.

    Args:
        name: id on the page and file name.
        title: heading.
        caption: text below.
        panels: its diagrams.
        legend: position of a row → its label; color and marker follow from the position.
        further: diagrams that only the page has, one per silo, of which the reader chooses.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    legend: Mapping[int, str] = field(default_factory=dict)
    further: tuple[Panel, ...] = ()


def line_style(position: int) -> dict[str, Any]:
    """Return color, marker and line style of a row; the line style changes after ten rows."""
    cycle = position // len(COLORS)
    return {
        "color": COLORS[position % len(COLORS)],
        "marker": MARKERS[position % len(MARKERS)],
        "linestyle": ("-", "--", ":", "-.")[cycle % 4],
    }


def artist_name(position: int, kind: str) -> str:
    """Return the id of what a row draws, by which the page hides and shows it."""
    return f"row{position}-{kind}"


def _draw(panel: Panel, axes: Axes) -> Sequence[Mark]:
    marks = panel.draw(axes)
    axes.set_title(panel.title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(panel.x, fontsize=9, color=INK)
    axes.set_ylabel(panel.y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    return marks


def panel_svg(panel: Panel, salt: str) -> str:
    """Render a diagram as inline SVG with transparent background; text and grid take the page's colors.

    Its attribute `data-marks` has its values as JSON: [x, y, text], the place in percent of width and height.

    Args:
        panel: the diagram.
        salt: prefix of all ids, which must be unique on a page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure = Figure(figsize=(panel.width, panel.height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        marks = _draw(panel, axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        places = _places(figure, axes, marks)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'id="([^"]+)"', rf'id="{salt}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{salt}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{salt}-\1)", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    label = f"{panel.title}: {panel.y} against {panel.x}" if panel.x else panel.title
    data = html.escape(json.dumps(places, ensure_ascii=False, separators=(",", ":")))
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}" data-marks="{data}"', 1)


def _places(figure: Figure, axes: Axes, marks: Sequence[Mark]) -> list[tuple[float, float, str]]:
    """Return every mark's place in percent of the drawn figure's width and height, from its upper left corner."""
    places = []
    for mark in marks:
        x, y = figure.transFigure.inverted().transform(axes.transData.transform((mark.x, mark.y)))
        places.append((round(100 * x, 2), round(100 * (1 - y), 2), mark.text))
    return places


def save_figure(spec: FigureSpec, folder: Path) -> list[Path]:
    """Save a whole figure as PNG and SVG files, and return their paths."""
    figure = draw_figure(spec)
    paths = [folder / f"{spec.name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def draw_figure(spec: FigureSpec) -> Figure:
    """Draw a figure's panels and their legend; a notebook shows the result."""
    from matplotlib.lines import Line2D

    columns = min(3, len(spec.panels))
    rows = -(-len(spec.panels) // columns)
    width, height = max(p.width for p in spec.panels), max(p.height for p in spec.panels)
    labels = 0.3 * -(-len(spec.legend) // max(1, columns * 2)) + 0.2 if spec.legend else 0
    figure = notebook_figure(width * columns, height * rows + labels)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(panels, spec.panels, strict=False):
        _draw(panel, axes)
    for axes in figure.axes[len(spec.panels) : rows * columns]:
        axes.set_visible(False)
    if spec.legend:
        handles = [Line2D([], [], label=name, **line_style(n)) for n, name in spec.legend.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns * 2), frameon=False)
    return figure


def horizontal_bars(
    axes: Axes, names: Sequence[str], groups: Sequence[tuple[int, str, Sequence[float]]], unit: str
) -> list[Mark]:
    """Draw horizontal bars: for each name one bar per group.

    Args:
        axes: where to draw.
        names: labels of the y axis.
        groups: (position in the legend, label, value per name).
        unit: of the values.

    Returns:
        The values.
    """
    thickness, marks = 0.8 / len(groups), []
    for number, (position, label, values) in enumerate(groups):
        heights = [index - 0.4 + (number + 0.5) * thickness for index in range(len(names))]
        color = line_style(position)["color"]
        bars = axes.barh(heights, list(values), height=thickness * 0.92, color=color)
        for index, bar in enumerate(bars):
            bar.set_gid(artist_name(position, f"bar{index}"))
        marks += [
            Mark(value, height, f"{name}, {label}: {value:.3g} {unit}")
            for name, height, value in zip(names, heights, values, strict=True)
        ]
    axes.set_yticks(range(len(names)), labels=[wrap_label(name) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return marks
