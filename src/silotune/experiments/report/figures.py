"""`report_figures`: a report's figures: scores, traffic, loss terms, similarities, bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from silotune.experiments.report.entries import ReportEntry, centrally_evaluated, distinguishable_silos, silo_names
from silotune.experiments.report.scores import Score, average_columns, mean_score
from silotune.experiments.report.series import (
    Curve,
    curve,
    loss_term,
    loss_terms,
    mean_validation,
    sent_by_silo,
    split_seconds,
    traffic,
    validation_of,
    values_by_silo,
)
from silotune.experiments.report.svg import GRID, INK, FigureSpec, Panel, horizontal_bars, line_style, wrap_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Draw = Callable[[Axes], None]


_MOST_SILOS = 24
"""Number of silos up to which validation scores over rounds are shown per silo."""

_UNITS = {"contrastive": "mean over steps", "distance": "mean over steps (no unit)"}
"""Units of loss terms that are no log probabilities."""

_LOG_SCALE_RATIO = 20.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


def report_figures(entries: Sequence[ReportEntry], ddof: int = 1) -> list[FigureSpec]:
    """Return all figures that have data."""
    specs = [
        _tests(entries, ddof),
        _traffic(entries, ddof),
        _rounds(entries, ddof),
        _losses(entries, ddof),
        _similarity(entries),
        _sent(entries),
        _seconds(entries),
    ]
    return [spec for spec in specs if spec is not None]


def _legend(entries: Sequence[ReportEntry]) -> tuple[str, ...]:
    return tuple(entry.label for entry in entries)


def _lines(curves: Sequence[tuple[int, Curve]]) -> Draw:
    alpha = 0.15 if len(curves) <= 5 else 0.06  # many overlapping bands would hide the lines

    def draw(axes: Axes) -> None:
        for position, series in curves:
            marker_interval = max(1, len(series.x) // 8)
            axes.plot(
                series.x, series.mean, markersize=3.5, markevery=marker_interval, linewidth=1.4, **line_style(position)
            )
            if all(std is not None for std in series.std):
                low = [mean - (std or 0) for mean, std in zip(series.mean, series.std, strict=True)]
                high = [mean + (std or 0) for mean, std in zip(series.mean, series.std, strict=True)]
                axes.fill_between(series.x, low, high, color=line_style(position)["color"], alpha=alpha, linewidth=0)
        axes.grid(color=GRID, linewidth=0.6)
        axes.margins(x=0.03)

    return draw


def _over_rounds(curves: Sequence[tuple[int, Curve]]) -> Draw:
    lines = _lines(curves)

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        lines(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))

    return draw


def _with_data(pairs: Sequence[tuple[int, Curve | None]]) -> list[tuple[int, Curve]]:
    """Drop the rows without a curve."""
    return [(position, series) for position, series in pairs if series is not None]


def _rounds(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    silos = silo_names(entries)
    series_by_silo = [(name, validation_of(name)) for name in silos] if 1 < len(silos) <= _MOST_SILOS else []
    panels = []
    for title, series in [*series_by_silo, (_whole(entries), mean_validation)]:
        curves = _with_data([(n, curve(entry, series, ddof)) for n, entry in enumerate(entries)])
        if curves:
            panels.append(Panel(title, "round", "validation score (%)", _over_rounds(curves)))
    if not panels:
        return None
    caption = f"Validation score after every round{_band(entries)}."
    return FigureSpec("rounds", "Accuracy per round and silo", caption, tuple(panels), _legend(entries))


def _whole(entries: Sequence[ReportEntry]) -> str:
    return "all silos on the same rows" if centrally_evaluated(entries) else "mean over silos"


def _logarithmic(axes: Axes) -> None:
    """Make the x axis logarithmic with plain numbers: at 1, 2 and 5, or at powers of ten over wide ranges."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 60 * low else (1.0,), numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _band(entries: Sequence[ReportEntry]) -> str:
    return "; the band is ± one standard deviation over seeds" if any(len(entry.runs) > 1 for entry in entries) else ""


def _traffic(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    curves, without_traffic = [], []
    for position, entry in enumerate(entries):
        size, scores = curve(entry, traffic, ddof), curve(entry, mean_validation, ddof)
        if size is None or scores is None:
            continue
        if not size.mean[-1]:
            without_traffic.append((position, max(scores.mean)))
            continue
        size_at = dict(zip(size.x, size.mean, strict=True))
        points = [
            (size_at[x], mean, std)
            for x, mean, std in zip(scores.x, scores.mean, scores.std, strict=True)
            if x in size_at
        ]
        curves.append((position, Curve(*(list(column) for column in zip(*points, strict=True)))))
    if not curves:
        return None
    smallest, largest = min(c.x[0] for _, c in curves), max(c.x[-1] for _, c in curves)
    lines = _lines(curves)

    def draw(axes: Axes) -> None:
        lines(axes)
        for position, level in without_traffic:
            axes.axhline(level, color=line_style(position)["color"], linestyle="--", linewidth=1.2)
        if largest > _LOG_SCALE_RATIO * smallest:
            _logarithmic(axes)

    panel = Panel(_whole(entries), "sent and received so far (MiB)", "validation score (%)", draw, 3.6, 4.3)
    caption = f"Bytes are those of the serialized messages, all silos together, both ways{_band(entries)}."
    if without_traffic:
        caption += " Dashed: the best score of a method that sends nothing."
    return FigureSpec("communication", "Communication against accuracy", caption, (panel,), _legend(entries))


def _losses(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    panels = []
    for name in loss_terms(entries):
        curves = _with_data([(n, curve(entry, loss_term(name), ddof)) for n, entry in enumerate(entries)])
        if curves:
            unit = _UNITS.get(name, "mean over steps (nats)")
            panels.append(Panel(name.replace("_", " "), "round", unit, _over_rounds(curves)))
    if not panels:
        return None
    caption = f"Training loss and its terms as each method logs them, mean over silos{_band(entries)}."
    return FigureSpec("losses", "Loss terms over rounds", caption, tuple(panels), _legend(entries))


def _similarity(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    by_row = [(entry.label, values) for entry in entries if (values := values_by_silo(entry, "similarity_private"))]
    numbers = [value for _, values in by_row for series in values.values() for value in series.values()]
    if not numbers:
        return None
    low, high = min(numbers), max(max(numbers), min(numbers) + 1e-6)
    panels = [Panel(label, "round", "silo", _heatmap(values, low, high)) for label, values in by_row]
    caption = (
        "Similarity of a silo's global and private adapter as the method's loss measures it on training batches (CKA "
        "unless method.similarity says otherwise), mean over steps and seeds; one color scale for all."
    )
    return FigureSpec("similarity", "Private against global adapters", caption, tuple(panels))


def _heatmap(values: Mapping[str, Mapping[float, float]], low: float, high: float) -> Draw:
    silos, rounds = sorted(values), sorted({number for series in values.values() for number in series})
    table = [[values[silo].get(number, float("nan")) for number in rounds] for silo in silos]

    def draw(axes: Axes) -> None:
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

    return draw


def _sent(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    sent = [(n, sent_by_row) for n, entry in enumerate(entries) if any((sent_by_row := sent_by_silo(entry)).values())]
    if not sent:
        return None
    silos = sorted({name for _, sent_by_row in sent for name in sent_by_row})[:_MOST_SILOS]
    values = [value for _, sent_by_row in sent for value in sent_by_row.values() if value]

    def draw(axes: Axes) -> None:
        horizontal_bars(
            axes, silos, [(position, [sent_by_row.get(name, 0.0) for name in silos]) for position, sent_by_row in sent]
        )
        if max(values) > _LOG_SCALE_RATIO * min(values):
            _logarithmic(axes)

    height = max(2.2, 0.9 + len(silos) * (0.18 + 0.13 * len(sent)))
    panel = Panel("updates of all rounds", "left the silo (MiB)", "silo", draw, height, 4.3)
    caption = "What each silo sent in a whole run: size of its serialized messages, mean over seeds."
    return FigureSpec("sent", "What left each silo", caption, (panel,), tuple(entry.label for entry in entries))


def _seconds(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    spent = [split_seconds(entry) for entry in entries]
    if not any(sum(pair) for pair in spent):
        return None

    def draw(axes: Axes) -> None:
        positions = range(len(entries))
        colors = [line_style(position)["color"] for position in positions]
        training, other = [pair[0] for pair in spent], [pair[1] for pair in spent]
        axes.barh(positions, training, height=0.6, color=colors)
        axes.barh(positions, other, left=training, height=0.6, color=colors, alpha=0.4)
        axes.set_yticks(positions, labels=[wrap_label(entry.label) for entry in entries])
        axes.invert_yaxis()
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)

    panel = Panel("all rounds", "seconds", "method", draw, max(1.8, 0.9 + 0.34 * len(entries)), 4.3)
    caption = (
        "Solid: training, in silos and, where a method trains there, at the coordinator; pale: messages, aggregation "
        "and validation. Mean over seeds; without start-up."
    )
    return FigureSpec("seconds", "Time", caption, (panel,))


def _tests(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    silos = [*distinguishable_silos(entries)[:_MOST_SILOS], *average_columns(entries)]
    rows: list[tuple[int, list[Score | None]]] = [
        (position, [mean_score(entry, silo, ddof) for silo in silos]) for position, entry in enumerate(entries)
    ]
    if not any(test_score for _, scores in rows for test_score in scores):
        return None

    def draw(axes: Axes) -> None:
        step = 0.7 / max(1, len(rows))
        for number, (position, scores) in enumerate(rows):
            points = [
                (test_score.mean, n - 0.35 + (number + 0.5) * step, test_score.std)
                for n, test_score in enumerate(scores)
                if test_score
            ]
            x, y, std = zip(*points, strict=True) if points else ((), (), ())
            appearance = line_style(position) | {"linestyle": "none"}
            axes.errorbar(x, y, xerr=[value or 0 for value in std], markersize=4, elinewidth=1, **appearance)
        for line in range(1, len(silos)):
            axes.axhline(line - 0.5, color=GRID, linewidth=0.6)
        axes.set_yticks(range(len(silos)), labels=[wrap_label(name) for name in silos])
        axes.set_ylim(len(silos) - 0.5, -0.5)
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)

    height = max(2.2, 0.9 + len(silos) * (0.25 + 0.05 * len(rows)))
    panel = Panel("at the best round by validation", "test score (%)", "silo", draw, height, 4.3)
    bars_ = " Bars are ± one standard deviation over seeds." if _band(entries) else ""
    caption = f"The table as a picture.{bars_}"
    return FigureSpec("tests", "Test score per silo", caption, (panel,), _legend(entries))
