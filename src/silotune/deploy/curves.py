"""`curve_chart`: curves over rounds as inline SVG, by hand, for the status page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#3d7be0", "#e2762b", "#2a9d66", "#d1477f", "#8b62d6", "#b08a10", "#1496a8", "#d94f45", "#758a2e", "#8a8f98")

_WIDTH, _HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 28

Points = Sequence[tuple[int, float | None]]


def curve_chart(title: str, series: Mapping[str, Points], colors: Mapping[str, str]) -> str:
    """Return a chart with one line per name; empty if there is no point.

    Args:
        title: below the chart.
        series: name → (round, value); values that are None or not finite are left out.
        colors: name → color; other names take the page's.
    """
    lines = {
        name: [(x, float(y)) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y)]
        for name, points in series.items()
    }
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    left, right = min(xs), max(max(xs), min(xs) + 1)
    low, high = min(ys), max(ys)
    margin = (high - low or abs(high) or 1.0) * 0.08
    low, high = low - margin, high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + across, _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [_grid(low + (high - low) * part, place(left, low + (high - low) * part)[1]) for part in (0, 0.5, 1)]
    for x in (left, right):
        drawn.append(_text(place(x, low)[0], _HEIGHT - 8, str(x), "start" if x == left else "end"))
    for name, points in lines.items():
        color = colors.get(name, "currentColor")
        where = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"><title>{escape(name)}</title>'
            "</polyline>"
        )
        last_x, last_y = where[-1]
        drawn.append(f'<circle cx="{last_x:.1f}" cy="{last_y:.1f}" r="3" fill="{color}"/>')
    return (
        f'<figure><svg role="img" aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}">{"".join(drawn)}</svg><figcaption>{escape(title)}</figcaption></figure>'
    )


def _grid(value: float, y: float) -> str:
    line = f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
    return line + _text(_LEFT - 6, y + 4, f"{value:.3g}", "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="var(--dim)">{text}</text>'
