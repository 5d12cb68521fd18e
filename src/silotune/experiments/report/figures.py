"""The figures of a report, from its rows. A figure without data is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from silotune.experiments.report.curves import (
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
from silotune.experiments.report.entries import ReportEntry, centrally_evaluated, distinguishable_silos, silo_names
from silotune.experiments.report.scores import AVERAGE, Score, mean_score
from silotune.experiments.report.svg import GRID, INK, FigureSpec, Panel, horizontal_bars, line_style, wrap_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Draw = Callable[[Axes], None]


_MOST_SILOS = 24
"""Beyond it accuracy over rounds is shown for the mean over silos only."""

_UNITS = {"contrastive": "mean over steps", "distance": "mean over steps (no unit)"}
"""Of terms that are no log probabilities, or (contrastive) of some methods only."""

_WIDE = 20.0
"""From this ratio of the largest to the smallest on, an axis is logarithmic."""


def report_figures(entries: Sequence[ReportEntry], ddof: int = 1) -> list[FigureSpec]:
    """All figures that have data."""
    found = [
        _tests(entries, ddof),
        _traffic(entries, ddof),
        _rounds(entries, ddof),
        _losses(entries, ddof),
        _similarity(entries),
        _sent(entries),
        _seconds(entries),
    ]
    return [spec for spec in found if spec is not None]


def _legend(entries: Sequence[ReportEntry]) -> tuple[str, ...]:
    return tuple(entry.label for entry in entries)


def _lines(curves: Sequence[tuple[int, Curve]]) -> Draw:
    strength = 0.15 if len(curves) <= 5 else 0.06  # many bands over one another hide the lines

    def draw(axes: Axes) -> None:
        for position, found in curves:
            every = max(1, len(found.x) // 8)
            axes.plot(found.x, found.mean, markersize=3.5, markevery=every, linewidth=1.4, **line_style(position))
            if all(std is not None for std in found.std):
                low = [mean - (std or 0) for mean, std in zip(found.mean, found.std, strict=True)]
                high = [mean + (std or 0) for mean, std in zip(found.mean, found.std, strict=True)]
                axes.fill_between(found.x, low, high, color=line_style(position)["color"], alpha=strength, linewidth=0)
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


def _found(pairs: Sequence[tuple[int, Curve | None]]) -> list[tuple[int, Curve]]:
    return [(position, found) for position, found in pairs if found is not None]


def _rounds(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    silos = silo_names(entries)
    wanted = [(name, validation_of(name)) for name in silos] if 1 < len(silos) <= _MOST_SILOS else []
    panels = []
    for title, series in [*wanted, (_whole(entries), mean_validation)]:
        curves = _found([(n, curve(entry, series, ddof)) for n, entry in enumerate(entries)])
        if curves:
            panels.append(Panel(title, "round", "validation score (%)", _over_rounds(curves)))
    if not panels:
        return None
    caption = f"Validation score after every round{_band(entries)}."
    return FigureSpec("rounds", "Accuracy per round and silo", caption, tuple(panels), _legend(entries))


def _whole(entries: Sequence[ReportEntry]) -> str:
    return "all silos on the same rows" if centrally_evaluated(entries) else "mean over silos"


def _logarithmic(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers: at 1, 2 and 5, or at powers of ten where it spans many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 60 * low else (1.0,), numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _band(entries: Sequence[ReportEntry]) -> str:
    return "; the band is ± one standard deviation over seeds" if any(len(entry.runs) > 1 for entry in entries) else ""


def _traffic(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    curves, silent = [], []
    for position, entry in enumerate(entries):
        size, scores = curve(entry, traffic, ddof), curve(entry, mean_validation, ddof)
        if size is None or scores is None:
            continue
        if not size.mean[-1]:
            silent.append((position, max(scores.mean)))
            continue
        at = dict(zip(size.x, size.mean, strict=True))
        kept = [(at[x], mean, std) for x, mean, std in zip(scores.x, scores.mean, scores.std, strict=True) if x in at]
        curves.append((position, Curve(*(list(column) for column in zip(*kept, strict=True)))))
    if not curves:
        return None
    smallest, largest = min(c.x[0] for _, c in curves), max(c.x[-1] for _, c in curves)
    lines = _lines(curves)

    def draw(axes: Axes) -> None:
        lines(axes)
        for position, level in silent:
            axes.axhline(level, color=line_style(position)["color"], linestyle="--", linewidth=1.2)
        if largest > _WIDE * smallest:
            _logarithmic(axes)

    panel = Panel(_whole(entries), "sent and received so far (MiB)", "validation score (%)", draw, 3.6, 4.3)
    caption = f"Bytes are those of the serialized messages, all silos together, both ways{_band(entries)}."
    if silent:
        caption += " Dashed: the best score of a method that sends nothing."
    return FigureSpec("communication", "Communication against accuracy", caption, (panel,), _legend(entries))


def _losses(entries: Sequence[ReportEntry], ddof: int) -> FigureSpec | None:
    panels = []
    for name in loss_terms(entries):
        curves = _found([(n, curve(entry, loss_term(name), ddof)) for n, entry in enumerate(entries)])
        if curves:
            unit = _UNITS.get(name, "mean over steps (nats)")
            panels.append(Panel(name.replace("_", " "), "round", unit, _over_rounds(curves)))
    if not panels:
        return None
    caption = f"Training loss and its terms as each method logs them, mean over silos{_band(entries)}."
    return FigureSpec("losses", "Loss terms over rounds", caption, tuple(panels), _legend(entries))


def _similarity(entries: Sequence[ReportEntry]) -> FigureSpec | None:
    found = [(entry.label, values) for entry in entries if (values := values_by_silo(entry, "similarity_private"))]
    numbers = [value for _, values in found for series in values.values() for value in series.values()]
    if not numbers:
        return None
    low, high = min(numbers), max(max(numbers), min(numbers) + 1e-6)
    panels = [Panel(label, "round", "silo", _heatmap(values, low, high)) for label, values in found]
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
    sent = [(n, found) for n, entry in enumerate(entries) if any((found := sent_by_silo(entry)).values())]
    if not sent:
        return None
    silos = sorted({name for _, found in sent for name in found})[:_MOST_SILOS]
    values = [value for _, found in sent for value in found.values() if value]

    def draw(axes: Axes) -> None:
        horizontal_bars(axes, silos, [(position, [found.get(name, 0.0) for name in silos]) for position, found in sent])
        if max(values) > _WIDE * min(values):
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
        places = range(len(entries))
        colours = [line_style(position)["color"] for position in places]
        training, rest = [pair[0] for pair in spent], [pair[1] for pair in spent]
        axes.barh(places, training, height=0.6, color=colours)
        axes.barh(places, rest, left=training, height=0.6, color=colours, alpha=0.4)
        axes.set_yticks(places, labels=[wrap_label(entry.label) for entry in entries])
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
    silos = [*distinguishable_silos(entries)[:_MOST_SILOS], AVERAGE]
    rows: list[tuple[int, list[Score | None]]] = [
        (position, [mean_score(entry, silo, ddof) for silo in silos]) for position, entry in enumerate(entries)
    ]
    if not any(found for _, scores in rows for found in scores):
        return None

    def draw(axes: Axes) -> None:
        step = 0.7 / max(1, len(rows))
        for number, (position, scores) in enumerate(rows):
            points = [
                (found.mean, n - 0.35 + (number + 0.5) * step, found.std) for n, found in enumerate(scores) if found
            ]
            x, y, std = zip(*points, strict=True) if points else ((), (), ())
            look = line_style(position) | {"linestyle": "none"}
            axes.errorbar(x, y, xerr=[value or 0 for value in std], markersize=4, elinewidth=1, **look)
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
