"""`report_figures`: a report's figures: scores, traffic, loss terms, similarities, errors, bytes, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from silotune.core.notebook import wrap_label
from silotune.lab.report.curve_figures import (
    Draw,
    legend,
    logarithmic,
    losses_figure,
    needs_log_scale,
    product_error_figure,
    rounds_figure,
    scores_axis,
    traffic_figure,
)
from silotune.lab.report.entries import ReportEntry, distinguishable_silos
from silotune.lab.report.score_intervals import Interval, interval_text, score_interval
from silotune.lab.report.scores import average_columns, mean_score
from silotune.lab.report.series import sent_by_silo, split_seconds, values_by_silo
from silotune.lab.report.svg import (
    GRID,
    INK,
    FigureSpec,
    Mark,
    Panel,
    artist_name,
    horizontal_bars,
    line_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SILOS = 16
"""Number of silos up to which a figure has a line of its own for each; beyond it, silos are dots in one line."""


def report_figures(entries: Sequence[ReportEntry], ddof: int = 1) -> list[FigureSpec]:
    """Return all figures that have data."""
    specs = [
        _tests(entries),
        traffic_figure(entries, ddof),
        rounds_figure(entries, ddof),
        losses_figure(entries, ddof),
        _similarity(entries),
        product_error_figure(entries, ddof),
        _sent(entries),
        _seconds(entries),
    ]
    return [spec for spec in specs if spec is not None]


def _similarity(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    by_row = [(entry.label, values) for entry in entries if (values := values_by_silo(entry, "similarity_private"))]
    numbers = [value for _, values in by_row for series in values.values() for value in series.values()]
    if not numbers:
        return None
    low, high = min(0.0, -1.0 if min(numbers) < 0 else 0.0), max(1.0, *numbers)
    panels = [
        Panel(label, "round", "silo", _heatmap(values, low, high), max(2.9, 0.9 + 0.2 * len(values)))
        for label, values in by_row
    ]
    caption = (
        "Similarity of a silo's global and private adapter as the method's loss measures it on training batches (CKA "
        "unless method.similarity says otherwise), mean over steps and seeds; one color scale for all, over all values "
        "that a similarity can have."
    )
    return FigureSpec("similarity", "Private against global adapters", caption, tuple(panels))


def _heatmap(values: Mapping[str, Mapping[float, float]], low: float, high: float) -> Draw:
    silos, rounds = sorted(values), sorted({number for series in values.values() for number in series})
    table = [[values[silo].get(number, float("nan")) for number in rounds] for silo in silos]

    def draw(axes: Axes) -> list[Mark]:
        from matplotlib.ticker import MaxNLocator

        edges = [*(number - 0.5 for number in rounds), rounds[-1] + 0.5]
        mesh = axes.pcolormesh(edges, range(len(silos) + 1), table, cmap="viridis", vmin=low, vmax=high)
        axes.set_yticks([n + 0.5 for n in range(len(silos))], labels=[wrap_label(name) for name in silos])
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        scale = axes.figure.colorbar(mesh, ax=axes)
        scale.set_label("similarity (no unit)", color=INK, fontsize=8)
        scale.ax.tick_params(labelsize=8, colors=INK)
        scale.outline.set_visible(False)
        return [
            Mark(number, row + 0.5, f"{silo}, round {number:g}: {values[silo][number]:.4f}")
            for row, silo in enumerate(silos)
            for number in rounds
            if number in values[silo]
        ]

    return draw


def _sent(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    sent = [
        (position, entry.label, by_silo)
        for position, entry in enumerate(entries)
        if any((by_silo := sent_by_silo(entry)).values())
    ]
    if not sent:
        return None
    silos = sorted({name for _, _, by_silo in sent for name in by_silo})
    many = len(silos) > _MOST_SILOS

    def draw(axes: Axes) -> Sequence[Mark]:
        if many:
            dots = [(position, label, by_silo) for position, label, by_silo in sent]
            marks = _dots_by_method(axes, dots, "MiB")
            axes.set_xlim(left=0)
        else:
            bars = [(position, label, [of.get(name, 0.0) for name in silos]) for position, label, of in sent]
            marks = horizontal_bars(axes, silos, bars, "MiB")
        if needs_log_scale([value for _, _, by_silo in sent for value in by_silo.values()]):
            logarithmic(axes)
        return marks

    rows = len(sent) * 3 if many else len(silos)
    height = max(2.2, 0.9 + rows * (0.18 + (0 if many else 0.13 * len(sent))))
    panel = Panel("updates of all rounds", "left the silo (MiB)", "method" if many else "silo", draw, height, 4.3)
    caption = "What each silo sent in a whole run: size of its serialized messages, mean over seeds."
    if len(sent) < len(entries):
        caption += f" Nothing: {', '.join(e.label for n, e in enumerate(entries) if n not in {s[0] for s in sent})}."
    return FigureSpec("sent", "What left each silo", caption, (panel,), {n: label for n, label, _ in sent})


def _dots_by_method(axes: Axes, rows: Sequence[tuple[int, str, Mapping[str, float]]], unit: str) -> list[Mark]:
    """Draw a line of dots per method, a dot for each silo and a bar at their mean; many silos stay readable so."""
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
            Mark(value, place, f"{silo}, {label}: {value:.4g} {unit}")
            for silo, place, value in zip(ordered, places, numbers, strict=True)
        ]
        marks.append(Mark(mean, line - 0.4, f"mean over {len(numbers)} silos, {label}: {mean:.4g} {unit}"))
    axes.set_yticks(range(len(rows)), labels=[wrap_label(label) for _, label, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return marks


def _seconds(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    spent = [split_seconds(entry) for entry in entries]
    if not any(sum(pair) for pair in spent):
        return None

    def draw(axes: Axes) -> list[Mark]:
        positions = range(len(entries))
        colors = [line_style(position)["color"] for position in positions]
        training, other = [pair[0] for pair in spent], [pair[1] for pair in spent]
        axes.barh(positions, training, height=0.6, color=colors)
        axes.barh(positions, other, left=training, height=0.6, color=colors, alpha=0.4)
        axes.set_yticks(positions, labels=[wrap_label(entry.label) for entry in entries])
        axes.invert_yaxis()
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        return [
            Mark(pair[0], position, f"{entry.label}: training {pair[0]:.0f} s, rest {pair[1]:.0f} s")
            for position, (entry, pair) in enumerate(zip(entries, spent, strict=True))
        ]

    panel = Panel("all rounds", "seconds", "method", draw, max(1.8, 0.9 + 0.34 * len(entries)), 4.3)
    caption = (
        "Solid: training, in silos and, where a method trains there, at the coordinator; pale: messages, aggregation "
        "and validation. Mean over seeds; without start-up."
    )
    return FigureSpec("seconds", "Time", caption, (panel,))


def _tests(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    silos, averages = distinguishable_silos(entries), average_columns(entries)
    many = len(silos) > _MOST_SILOS
    columns = averages if many else [*silos, *averages]
    rows = [(position, entry.label, entry) for position, entry in enumerate(entries)]
    if not any(mean_score(entry, column) for entry in entries for column in [*silos, *averages]):
        return None
    axis = f"test {scores_axis(entries)}"
    if many:
        dots = [
            (position, label, {silo: score.mean for silo in silos if (score := mean_score(entry, silo))})
            for position, label, entry in rows
        ]
        height = max(2.2, 0.9 + 0.55 * len(rows))
        by_silo = Panel("a dot for each silo", axis, "method", _dots([row for row in dots if row[2]]), height, 4.3)
        panels = [by_silo, Panel("averages", axis, "", _with_intervals(rows, columns), 2.2 + 0.08 * len(rows), 4.3)]
        caption = f"{len(silos)} silos; the upright bar is their mean."
    else:
        height = max(2.2, 0.9 + len(columns) * (0.25 + 0.05 * len(rows)))
        panels = [Panel("at the best round by validation", axis, "silo", _with_intervals(rows, columns), height, 4.3)]
        caption = "At the round that is best by validation."
    caption += " Lines are 95 % intervals (see Results)."
    return FigureSpec("tests", "Test score per silo", caption, tuple(panels), legend(entries))


def _dots(rows: Sequence[tuple[int, str, Mapping[str, float]]]) -> Draw:
    return lambda axes: _dots_by_method(axes, rows, "")


def _with_intervals(rows: Sequence[tuple[int, str, ReportEntry]], columns: Sequence[str]) -> Draw:
    """Return a drawing of every row's score in every column, with its 95 % interval."""

    def draw(axes: Axes) -> list[Mark]:
        step, marks = 0.7 / max(1, len(rows)), []
        for number, (position, label, entry) in enumerate(rows):
            for line, column in enumerate(columns):
                score = mean_score(entry, column)
                if score is None:
                    continue
                place, interval = line - 0.35 + (number + 0.5) * step, score_interval(entry, column)
                _point(axes, position, f"{line}", score.mean, place, interval)
                known = f" ({interval_text(interval)})" if interval else ""
                marks.append(Mark(score.mean, place, f"{column}, {label}: {score.text}{known}"))
        for line in range(1, len(columns)):
            axes.axhline(line - 0.5, color=GRID, linewidth=0.6)
        axes.set_yticks(range(len(columns)), labels=[wrap_label(name) for name in columns])
        axes.set_ylim(len(columns) - 0.5, -0.5)
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        return marks

    return draw


def _point(axes: Axes, position: int, name: str, score: float, place: float, interval: Interval | None) -> None:
    """Draw one score with its interval."""
    style = line_style(position)
    if interval is not None:
        gid = artist_name(position, f"interval{name}")
        axes.plot(interval, [place, place], color=style["color"], linewidth=1, gid=gid)
    marker = style | {"linestyle": "none"}
    axes.plot([score], [place], markersize=4, gid=artist_name(position, f"score{name}"), **marker)
