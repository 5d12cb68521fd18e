"""Figures of curves: validation scores over rounds, scores against traffic, loss terms, errors of averaging."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from silotune.data.metrics import metric_title
from silotune.lab.report.entries import ReportEntry, centrally_evaluated, silo_names
from silotune.lab.report.series import (
    Curve,
    curve,
    loss_term,
    loss_terms,
    mean_validation,
    product_error,
    traffic,
    validation_of,
)
from silotune.lab.report.svg import GRID, FigureSpec, Mark, Panel, artist_name, line_style
from silotune.runs.scores import metrics_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes"], Sequence[Mark]]

MOST_PANELS = 12
"""Number of silos up to which a figure has a diagram for each; beyond it, the page's reader chooses one."""

_MOST_CHOICES = 60
"""Number of silos up to which the page has a diagram for each."""

_UNITS = {"contrastive": "mean over steps", "distance": "mean over steps (no unit)"}
"""Units of loss terms that are no log probabilities."""

_LOG_SCALE_RATIO = 20.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""

LabeledCurve = tuple[int, str, Curve]
"""A row's position, its label, and its curve."""


def legend(entries: Sequence[ReportEntry]) -> dict[int, str]:
    """Return position → label of all rows."""
    return {position: entry.label for position, entry in enumerate(entries)}


def lines(curves: Sequence[LabeledCurve], x_unit: str) -> Draw:
    """Return a drawing of curves with bands of ± one standard deviation; `x_unit` names x in the values' texts."""
    alpha = 0.15 if len(curves) <= 5 else 0.06  # many overlapping bands would hide the lines

    def draw(axes: Axes) -> list[Mark]:
        marks = []
        for position, label, series in curves:
            style, interval = line_style(position), max(1, len(series.x) // 8)
            axes.plot(
                series.x,
                series.mean,
                markersize=3.5,
                markevery=interval,
                linewidth=1.4,
                gid=artist_name(position, "line"),
                **style,
            )
            if all(std is not None for std in series.std):
                low = [mean - (std or 0) for mean, std in zip(series.mean, series.std, strict=True)]
                high = [mean + (std or 0) for mean, std in zip(series.mean, series.std, strict=True)]
                _band(axes, position, series.x, low, high, alpha)
            marks += [
                Mark(x, mean, f"{label}, {x_unit.format(x)}: {mean:.4g}" + ("" if std is None else f" ± {std:.2g}"))
                for x, mean, std in zip(series.x, series.mean, series.std, strict=True)
            ]
        axes.grid(color=GRID, linewidth=0.6)
        axes.margins(x=0.03)
        return marks

    return draw


def _band(
    axes: Axes, position: int, x: Sequence[float], low: Sequence[float], high: Sequence[float], alpha: float
) -> None:
    color, name = line_style(position)["color"], artist_name(position, "band")
    axes.fill_between(x, low, high, color=color, alpha=alpha, linewidth=0, gid=name)


def _over_rounds(draw: Draw) -> Draw:
    """Give a drawing whole numbers on its x axis."""

    def with_whole_rounds(axes: Axes) -> Sequence[Mark]:
        from matplotlib.ticker import MaxNLocator

        marks = draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        return marks

    return with_whole_rounds


def _of_all(entries: Sequence[ReportEntry], read: Callable[[ReportEntry], Curve | None]) -> list[LabeledCurve]:
    """Read every entry's curve; entries without one are left out."""
    curves = ((position, entry.label, read(entry)) for position, entry in enumerate(entries))
    return [(position, label, found) for position, label, found in curves if found is not None]


def rounds_figure(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    """Validation scores over rounds: of every silo and their mean; with many silos, their spread, and one by choice."""
    names, axis = silo_names(entries), validation_axis(entries)

    def panel(title: str, curves: Sequence[LabeledCurve], silo: str = "") -> list[Panel]:
        draw = _over_rounds(lines(curves, "round {:g}"))
        return [Panel(title, "round", axis, draw, silo=silo)] if curves else []

    of_silos = [
        one
        for name in (names if 1 < len(names) <= _MOST_CHOICES else [])
        for one in panel(name, _of_all(entries, lambda entry, name=name: curve(entry, validation_of(name), ddof)), name)  # type: ignore[misc]
    ]
    whole = panel(whole_title(entries), _of_all(entries, lambda entry: curve(entry, mean_validation, ddof)))
    caption = f"Validation after every round{_band_note(entries)}."
    if len(names) <= MOST_PANELS:
        panels, further = [*of_silos, *whole], []
    else:
        panels, further = [*whole, *_spread_panel(entries, names, axis)], of_silos
        if len(panels) > 1:
            caption += " Spread: the median over silos, and the band from the 10th to the 90th percentile of silos."
    if not panels:
        return None
    title = "Validation over rounds" if centrally_evaluated(entries) else "Validation per round and silo"
    return FigureSpec("rounds", title, caption, tuple(panels), legend(entries), tuple(further))


def _spread_panel(entries: Sequence[ReportEntry], names: Sequence[str], axis: str) -> list[Panel]:
    """Make the diagram of the silos' median and of the band that holds eight of ten silos."""
    spreads = [
        (position, entry.label, found)
        for position, entry in enumerate(entries)
        if (found := _spread(entry, names)) is not None
    ]
    if not spreads:
        return []
    medians = [(position, label, Curve(x, median, [None] * len(x))) for position, label, (x, _, median, _) in spreads]

    def draw(axes: Axes) -> Sequence[Mark]:
        marks = lines(medians, "median of silos, round {:g}")(axes)
        for position, _, (x, low, _, high) in spreads:
            _band(axes, position, x, low, high, 0.12)
        return marks

    return [Panel(f"spread over {len(names)} silos", "round", axis, _over_rounds(draw))]


def _spread(
    entry: ReportEntry, names: Sequence[str]
) -> tuple[list[float], list[float], list[float], list[float]] | None:
    """Return rounds and the 10th, 50th and 90th percentile over silos, means over seeds; None without scores."""
    by_round: dict[float, list[float]] = {}
    for name in names:
        series = curve(entry, validation_of(name))
        for number, mean in zip(series.x, series.mean, strict=True) if series else ():
            by_round.setdefault(number, []).append(mean)
    x = sorted(number for number, values in by_round.items() if len(values) > 1)
    if not x:
        return None
    tenths = [statistics.quantiles(by_round[number], n=10, method="inclusive") for number in x]
    return x, [cut[0] for cut in tenths], [cut[4] for cut in tenths], [cut[8] for cut in tenths]


def validation_axis(entries: Sequence[ReportEntry]) -> str:
    """Name what validation rows were judged by: the metric if all silos have one, or the loss."""
    runs = [run for entry in entries for run in entry.runs]
    if any((run.config.get("evaluation") or {}).get("validation") == "loss" for run in runs):
        return "validation loss"
    return f"validation {scores_axis(entries)}"


def scores_axis(entries: Sequence[ReportEntry]) -> str:
    """Name the scores on an axis: the metric if all silos have one."""
    metrics = {metric for entry in entries for run in entry.runs for metric in metrics_of(run.summary)}
    if metrics <= {"loss", "perplexity"}:
        return metric_title(next(iter(metrics))) if len(metrics) == 1 else "score"
    return f"{metric_title(next(iter(metrics)))} (%)" if len(metrics) == 1 else "score (%)"


def whole_title(entries: Sequence[ReportEntry]) -> str:
    """Name what the curve of all silos shows."""
    return "all silos on the same rows" if centrally_evaluated(entries) else "mean over silos"


def logarithmic(axes: Axes) -> None:
    """Make the x axis logarithmic with plain numbers: at 1, 2 and 5, or at powers of ten over wide ranges."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 60 * low else (1.0,), numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def needs_log_scale(values: Sequence[float]) -> bool:
    """Whether values differ so much that the small ones vanish on a linear axis."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > _LOG_SCALE_RATIO * min(positive)


def _band_note(entries: Sequence[ReportEntry]) -> str:
    return "; the band is ± one standard deviation over seeds" if any(len(entry.runs) > 1 for entry in entries) else ""


def traffic_figure(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    """Validation score against the bytes of all messages so far."""
    curves: list[LabeledCurve] = []
    silent = []
    for position, entry in enumerate(entries):
        size, scores = curve(entry, traffic, ddof), curve(entry, mean_validation, ddof)
        if size is None or scores is None:
            continue
        if not size.mean[-1]:
            silent.append((position, entry.label, max(scores.mean)))
            continue
        size_at = dict(zip(size.x, size.mean, strict=True))
        points = [
            (size_at[x], mean, std)
            for x, mean, std in zip(scores.x, scores.mean, scores.std, strict=True)
            if x in size_at
        ]
        if points:
            columns = (list(column) for column in zip(*points, strict=True))
            curves.append((position, entry.label, Curve(*columns)))
    if not curves:
        return None
    draw_lines = lines(curves, "{:.3g} MiB")

    def draw(axes: Axes) -> list[Mark]:
        marks = [*draw_lines(axes)]
        for position, label, level in silent:
            color = line_style(position)["color"]
            axes.axhline(level, color=color, linestyle="--", linewidth=1.2, gid=artist_name(position, "level"))
            marks.append(Mark(curves[0][2].x[0], level, f"{label}, sends nothing: {level:.4g}"))
        if needs_log_scale([size for _, _, series in curves for size in (series.x[0], series.x[-1])]):
            logarithmic(axes)
        return marks

    x, y = "sent and received so far (MiB)", validation_axis(entries)
    caption = f"Bytes are those of the serialized messages, all silos together, both ways{_band_note(entries)}."
    if silent:
        caption += " Dashed: the best score of a method that sends nothing."
    panel = Panel(whole_title(entries), x, y, draw, 3.6, 4.3)
    return FigureSpec("communication", "Validation against traffic", caption, (panel,), legend(entries))


def losses_figure(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    """Training loss and its terms over rounds."""
    panels = []
    for name in loss_terms(entries):
        curves = _of_all(entries, lambda entry, name=name: curve(entry, loss_term(name), ddof))  # type: ignore[misc]
        if curves:
            unit = _UNITS.get(name, "mean over steps (nats)")
            panels.append(Panel(name.replace("_", " "), "round", unit, _over_rounds(lines(curves, "round {:g}"))))
    if not panels:
        return None
    caption = f"Training loss and its terms as each method logs them, mean over silos{_band_note(entries)}."
    return FigureSpec("losses", "Loss terms over rounds", caption, tuple(panels), legend(entries))


def product_error_figure(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    """The error of averaging LoRA's A and B apart, over rounds."""
    curves = _of_all(entries, lambda entry: curve(entry, product_error, ddof))
    if not curves:
        return None
    draw_lines = _over_rounds(lines(curves, "round {:g}"))

    def draw(axes: Axes) -> Sequence[Mark]:
        marks = draw_lines(axes)
        highest = max(mark.y for mark in marks)
        axes.set_ylim(-0.04 * highest, 1.1 * highest if highest else 1.0)  # lines at 0 stay visible
        return marks

    caption = (
        "How far the product B·A of the aggregate is from the mean of the silos' products, relative to that mean "
        f"(Frobenius norm, all target modules){_band_note(entries)}. 0: averaging lost nothing."
    )
    without = [entry.label for position, entry in enumerate(entries) if position not in {one[0] for one in curves}]
    caption += f" No product is averaged: {', '.join(without)}." if without else ""
    labels = {position: label for position, label, _ in curves}
    panel = Panel("all target modules", "round", "share of the mean product", draw, 3.6, 4.3)
    return FigureSpec("product_error", "Error of averaging A and B", caption, (panel,), labels)
