"""How figures are drawn: panels of matplotlib, as SVG for the page or as PNG and SVG files, in one theme."""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silotune.core.notebook import COLORS, notebook_figure, wrap_label

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Placeholders that `panel_svg` replaces by CSS variables, so that one SVG serves light and dark themes.
INK, GRID = "#1a2b3c", "#c9d0d8"

_THEME: Any = {  # matplotlib names its keys in a type of its own
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.labelsize": 8,
    "xtick.color": INK,
    "ytick.labelsize": 8,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

_LOG_SCALE_RATIO = 20.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""

LabeledCurve = tuple[int, str, "pandas.DataFrame"]
"""A row's position, its label, and its curve as `Results.curve` returns it."""

LabeledValues = tuple[int, str, Mapping[str, float]]
"""A row's position, its label, and its value for each name."""

Mark = tuple[float, float, str]
"""A value of a diagram, which the page names when the pointer is near it: x, y and what it is."""


@dataclass(frozen=True)
class Panel:
    """One diagram, with the labels of its axes and its size in inches (3.9 are about 375 pixels on the page).

    `draw` draws the data on axes and returns its values; `panel_svg` and `save_figure` add titles and labels. A diagram
    of one silo names it, as the page's reader can choose silos.
    """

    title: str
    x: str
    y: str
    draw: Callable[[Axes], Sequence[Mark]]
    height: float = 2.9
    width: float = 3.9
    silo: str = ""


@dataclass(frozen=True)
class FigureSpec:
    """A figure of the report; its panels share one legend: a row's position, which says color and marker → its label.

    The name is its id on the page and that of its files.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    legend: Mapping[int, str] = field(default_factory=dict)


def line_style(position: int) -> dict[str, Any]:
    """Return color, marker and line style of a row; the line style changes after ten rows."""
    cycle = position // len(COLORS)
    return {
        "color": COLORS[position % len(COLORS)],
        "marker": MARKERS[position % len(MARKERS)],
        "linestyle": ("-", "--", ":", "-.")[cycle % 4],
    }


def artist_name(position: int, kind: str) -> str:
    """Return the id of a row's drawing, by which the page shows and hides it."""
    return f"row{position}-{kind}"


def _draw(panel: Panel, axes: Axes) -> Sequence[Mark]:
    marks = panel.draw(axes)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    return marks


def panel_svg(panel: Panel, salt: str) -> str:
    """Render a diagram as inline SVG with transparent background; text and grid take the page's colors.

    Its attribute `data-marks` has its values as JSON: [x, y, text], the place in percent of width and height. The salt
    is the prefix of all ids, which must be unique on a page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_THEME | {"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure = Figure(figsize=(panel.width, panel.height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        marks = _draw(panel, axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        at = figure.transFigure.inverted().transform(axes.transData.transform([mark[:2] for mark in marks]))
        places = [(round(100 * x, 2), round(100 * (1 - y), 2), mark[2]) for (x, y), mark in zip(at, marks, strict=True)]
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'id="([^"]+)"', rf'id="{salt}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{salt}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{salt}-\1)", svg)
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    label = f"{panel.title}: {panel.y} against {panel.x}" if panel.x else panel.title
    data = html.escape(json.dumps(places, ensure_ascii=False, separators=(",", ":")))
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}" data-marks="{data}"', 1)


def save_figure(spec: FigureSpec, folder: Path) -> list[Path]:
    """Save a whole figure as PNG and SVG files, and return their paths."""
    figure = draw_figure(spec)
    paths = [folder / f"{spec.name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def draw_figure(spec: FigureSpec) -> Figure:
    """Draw a figure's panels and their legend; a notebook shows the result."""
    import matplotlib
    from matplotlib.lines import Line2D

    columns = min(3, len(spec.panels))
    rows = -(-len(spec.panels) // columns)
    width, height = max(p.width for p in spec.panels), max(p.height for p in spec.panels)
    labels = 0.3 * -(-len(spec.legend) // max(1, columns * 2)) + 0.2 if spec.legend else 0
    figure = notebook_figure(width * columns, height * rows + labels)
    with matplotlib.rc_context(_THEME):
        for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, spec.panels, strict=False):
            _draw(panel, axes)
    for axes in figure.axes[len(spec.panels) : rows * columns]:
        axes.set_visible(False)
    if spec.legend:
        handles = [Line2D([], [], label=name, **line_style(n)) for n, name in spec.legend.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns * 2), frameon=False)
    return figure


def name_rows(axes: Axes, names: Sequence[str], above: float = 0.5) -> None:
    """Name the rows of a diagram from top to bottom, with lines of a grid at the values."""
    axes.set_yticks(range(len(names)), labels=[wrap_label(name) for name in names])
    axes.set_ylim(len(names) - 1 + above, -above)
    axes.grid(axis="x")


def whole_rounds(axes: Axes) -> None:
    """Give the x axis whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def logarithmic_if_wide(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic where the small values would vanish on a linear one.

    It then has plain numbers: at 1, 2 and 5, or at powers of ten over wide ranges.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    positive = [value for value in values if value > 0]
    if not positive or max(positive) <= _LOG_SCALE_RATIO * min(positive):
        return
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 60 * low else (1.0,), numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def band(axes: Axes, position: int, low: pandas.Series[float], high: pandas.Series[float], alpha: float) -> None:
    """Fill the area between two curves of a row."""
    color, name = line_style(position)["color"], artist_name(position, "band")
    axes.fill_between(low.index, low, high, color=color, alpha=alpha, linewidth=0, gid=name)


def lines(axes: Axes, curves: Sequence[LabeledCurve], x_unit: str = "round {:g}") -> list[Mark]:
    """Draw curves with bands of ± one standard deviation; `x_unit` names x in the values' texts."""
    alpha = 0.15 if len(curves) <= 5 else 0.06  # many overlapping bands would hide the lines
    marks = []
    for position, label, curve in curves:
        style, gid = line_style(position), artist_name(position, "line")
        interval = max(1, len(curve) // 8)
        axes.plot(curve.index, curve["mean"], markersize=3.5, markevery=interval, linewidth=1.4, gid=gid, **style)
        if curve["std"].notna().all():
            band(axes, position, curve["mean"] - curve["std"], curve["mean"] + curve["std"], alpha)
        for x, mean, std in curve[["mean", "std"]].itertuples():
            spread = "" if math.isnan(std) else f" ± {std:.2g}"
            marks.append((x, mean, f"{label}, {x_unit.format(x)}: {mean:.4g}{spread}"))
    axes.grid()
    axes.margins(x=0.03)
    return marks


def bars(axes: Axes, names: Sequence[str], groups: Sequence[LabeledValues], unit: str) -> list[Mark]:
    """Draw horizontal bars: for each name one bar of every row."""
    thickness, marks = 0.8 / len(groups), []
    for number, (position, label, values) in enumerate(groups):
        for index, name in enumerate(names):
            place, value = index - 0.4 + (number + 0.5) * thickness, values.get(name, 0.0)
            gid = artist_name(position, f"bar{index}")
            axes.barh(place, value, height=thickness * 0.92, color=line_style(position)["color"])[0].set_gid(gid)
            marks.append((value, place, f"{name}, {label}: {value:.3g} {unit}"))
    name_rows(axes, names)
    return marks


def dots(axes: Axes, rows: Sequence[LabeledValues], unit: str) -> list[Mark]:
    """Draw a line of dots for every row, a dot for each silo and a bar at their mean: many silos stay readable so."""
    marks = []
    for line, (position, label, values) in enumerate(rows):
        color = line_style(position)["color"]
        ordered = sorted(values, key=lambda name: values[name])
        places = [line + 0.32 * ((n * 7) % 11 / 5 - 1) for n in range(len(ordered))]  # apart, and always the same
        numbers = [values[name] for name in ordered]
        name = artist_name(position, "dots")
        axes.plot(numbers, places, ".", color=color, markersize=5, alpha=0.7, gid=name, linestyle="none")
        mean = sum(numbers) / len(numbers)
        axes.plot([mean, mean], [line - 0.4, line + 0.4], color=color, linewidth=2, gid=artist_name(position, "mean"))
        marks += [
            (value, place, f"{silo}, {label}: {value:.4g} {unit}")
            for silo, place, value in zip(ordered, places, numbers, strict=True)
        ]
        marks.append((mean, line - 0.4, f"mean over {len(numbers)} silos, {label}: {mean:.4g} {unit}"))
    name_rows(axes, [label for _, label, _ in rows], 0.6)
    return marks


def heatmap(
    axes: Axes,
    table: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    text: Callable[[float], str] | None = None,
    bold_diagonal: bool = False,
    **style: Any,
) -> AxesImage:
    """Draw a matrix with names of rows and columns; `style` goes to `imshow`.

    With `text`, every cell shows its value, white on dark cells; a dash if it has none.
    """
    import numpy as np

    image = axes.imshow(table, **style)
    axes.set_xticks(range(len(columns)), labels=columns)
    axes.set_yticks(range(len(rows)), labels=rows)
    if text is None:
        return image
    luminance = image.to_rgba(np.asarray(table))[..., :3] @ np.array([0.299, 0.587, 0.114])
    for (row, column), value in np.ndenumerate(table):
        known = not np.isnan(value)
        color = "white" if known and luminance[row, column] < 0.5 else "black"
        weight = "bold" if bold_diagonal and row == column else "normal"
        label = text(float(value)) if known else "–"
        axes.text(column, row, label, ha="center", va="center", fontsize=8, color=color, fontweight=weight)
    return image
