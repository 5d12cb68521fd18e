"""The figures of a report: test scores, validation over rounds and traffic, loss terms, bytes, time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from silotune.data.tasks import metric_title
from silotune.lab.report import drawing
from silotune.lab.report.drawing import FigureSpec, LabeledCurve, Mark, Panel
from silotune.lab.report.frame import Results
from silotune.lab.report.tables import interval_text
from silotune.runs.scores import metrics_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Shown = TypeVar("Shown", bound=Sized)

_MOST_LINES = 16
"""Number of silos up to which a figure has a line of its own for each; beyond it, silos are dots in one line."""

_MOST_PANELS = 12
"""Number of silos up to which a figure has a diagram for each; beyond it, their spread is drawn."""

_UNITS = {"contrastive": "mean over steps", "distance": "mean over steps (no unit)"}
"""Units of loss terms that are no log probabilities."""

_WIDE = 4.3  # inches


def report_figures(results: Results) -> list[FigureSpec]:
    """Return all figures that have data."""
    makers = (_tests, _traffic, rounds_figure, _losses, product_error_figure, _sent, _seconds)
    return [spec for make in makers if (spec := make(results)).panels]


def _legend(results: Results) -> dict[int, str]:
    return {position: entry.label for position, entry in enumerate(results.entries)}


def _of_entries(results: Results, reader: Callable[[str], Shown]) -> list[tuple[int, str, Shown]]:
    """Return position, label and the result of `reader` for each label; labels without a result are left out."""
    rows = ((position, label, reader(label)) for position, label in _legend(results).items())
    return [row for row in rows if len(row[2])]


def _curves(results: Results, name: str, silo: str | None = None) -> list[LabeledCurve]:
    return _of_entries(results, lambda label: results.curve(label, name, silo))


def _others(results: Results, rows: Sequence[tuple[int, str, Any]], what: str) -> str:
    """Name the entries that a figure lacks, for its caption."""
    positions = {position for position, *_ in rows}
    others = [label for position, label in _legend(results).items() if position not in positions]
    return f" {what}: {', '.join(others)}." if others else ""


def _over_rounds(curves: Sequence[LabeledCurve], axes: Axes) -> list[Mark]:
    marks = drawing.lines(axes, curves)
    drawing.whole_rounds(axes)
    return marks


def _scores_axis(results: Results) -> str:
    """Name the scores on an axis: the metric if all silos have one."""
    metrics = {metric for run in results.runs for metric in metrics_of(run.summary)}
    name = metric_title(next(iter(metrics))) if len(metrics) == 1 else "score"
    return name if metrics <= {"loss", "perplexity"} else f"{name} (%)"


def _validation_axis(results: Results) -> str:
    """Name the metric or loss that validation rows were judged by."""
    if any((run.config.get("evaluation") or {}).get("validation") == "loss" for run in results.runs):
        return "validation loss"
    return f"validation {_scores_axis(results)}"


def _whole(results: Results) -> str:
    return "all silos on the same rows" if results.central else "mean over silos"


def _band_note(results: Results) -> str:
    several = any(len(entry.runs) > 1 for entry in results.entries)
    return "; the band is ± one standard deviation over seeds" if several else ""


def rounds_figure(results: Results) -> FigureSpec:
    """Draw validation over rounds: of every silo and their mean; of many silos, their mean and their spread."""
    names, axis = results.silos, _validation_axis(results)

    def panel(title: str, curves: Sequence[LabeledCurve], silo: str = "") -> list[Panel]:
        return [Panel(title, "round", axis, partial(_over_rounds, curves), silo=silo)] if curves else []

    silos = names if 1 < len(names) <= _MOST_PANELS else []
    of_silos = [one for name in silos for one in panel(name, _curves(results, "validation", name), name)]
    spread = _spread(results, axis) if len(names) > _MOST_PANELS else []
    caption = f"Validation after every round{_band_note(results)}."
    if spread:
        caption += " Spread: the median over silos, and the band from the 10th to the 90th percentile of silos."
    title = "Validation over rounds" if results.central else "Validation per round and silo"
    whole = panel(_whole(results), _curves(results, "validation"))
    return FigureSpec("rounds", title, caption, [*of_silos, *whole, *spread], _legend(results))


def _spread(results: Results, axis: str) -> list[Panel]:
    """Make the diagram of the silos' median and of the band that holds eight of ten silos."""
    import pandas

    def tenths(label: str) -> pandas.DataFrame:
        logged = results.logged(label, "validation")
        logged = logged[logged["silo"].isin(results.silos)]
        by_round = logged.groupby(["round", "silo"])["value"].mean().groupby("round")
        by_round = by_round.filter(lambda values: len(values) > 1).groupby("round")
        shares = {"mean": 0.5, "low": 0.1, "high": 0.9}
        return pandas.DataFrame({name: by_round.quantile(share) for name, share in shares.items()} | {"std": math.nan})

    curves = _of_entries(results, tenths)

    def draw(axes: Axes) -> list[Mark]:
        marks = drawing.lines(axes, curves, "median of silos, round {:g}")
        for position, _, curve in curves:
            drawing.band(axes, position, curve["low"], curve["high"], 0.12)
        drawing.whole_rounds(axes)
        return marks

    return [Panel(f"spread over {len(results.silos)} silos", "round", axis, draw)] if curves else []


def _traffic(results: Results) -> FigureSpec:
    curves: list[LabeledCurve] = []
    silent = []
    for position, entry in enumerate(results.entries):
        size, scores = (results.curve(entry.label, name) for name in ("mib", "validation"))
        if len(size) and len(scores) and not size["mean"].iloc[-1]:
            silent.append((position, entry.label, scores["mean"].max()))
            continue
        by_size = scores.join(size["mean"].rename("mib"), how="inner").set_index("mib")
        if len(by_size):
            curves.append((position, entry.label, by_size))

    def draw(axes: Axes) -> list[Mark]:
        marks = drawing.lines(axes, curves, "{:.3g} MiB")
        for position, label, level in silent:
            color = drawing.line_style(position)["color"]
            axes.axhline(level, color=color, linestyle="--", linewidth=1.2, gid=drawing.artist_name(position, "level"))
            marks.append((curves[0][2].index[0], level, f"{label}, sends nothing: {level:.4g}"))
        drawing.logarithmic_if_wide(axes, [size for _, _, curve in curves for size in curve.index[[0, -1]]])
        return marks

    caption = f"Bytes are those of the serialized messages, all silos together, both ways{_band_note(results)}."
    if silent:
        caption += " Dashed: the best score of a method that sends nothing."
    panel = Panel(_whole(results), "sent and received so far (MiB)", _validation_axis(results), draw, 3.6, _WIDE)
    return FigureSpec(
        "communication", "Validation against traffic", caption, [panel] if curves else [], _legend(results)
    )


def _losses(results: Results) -> FigureSpec:
    names = {name.removeprefix("term ") for name in results.series["name"].unique() if name.startswith("term ")}
    terms = sorted((name for name in names if not name.startswith("similarity_")), key=lambda n: (n != "loss", n))
    panels = [
        Panel(
            name.replace("_", " "),
            "round",
            _UNITS.get(name, "mean over steps (nats)"),
            partial(_over_rounds, _curves(results, f"term {name}")),
        )
        for name in terms
    ]
    caption = f"Training loss and its terms as each method logs them, mean over silos{_band_note(results)}."
    return FigureSpec("losses", "Loss terms over rounds", caption, panels, _legend(results))


def product_error_figure(results: Results) -> FigureSpec:
    """Draw the error of averaging LoRA's A and B separately, over rounds."""
    curves = _curves(results, "product_error")

    def draw(axes: Axes) -> list[Mark]:
        marks = _over_rounds(curves, axes)
        highest = max(y for _, y, _ in marks)
        axes.set_ylim(-0.04 * highest, 1.1 * highest if highest else 1.0)  # lines at 0 stay visible
        return marks

    caption = (
        "How far the product B·A of the aggregate is from the mean of the silos' products, relative to that mean "
        f"(Frobenius norm, all target modules){_band_note(results)}. 0: averaging lost nothing."
    )
    caption += _others(results, curves, "No product is averaged")
    panel = Panel("all target modules", "round", "share of the mean product", draw, 3.6, _WIDE)
    labels = {position: label for position, label, _ in curves}
    return FigureSpec("product_error", "Error of averaging A and B", caption, [panel] if curves else [], labels)


def _sent(results: Results) -> FigureSpec:
    entries = _of_entries(results, results.sent_by_silo)
    silos = sorted({name for _, _, by_silo in entries for name in by_silo})
    many = len(silos) > _MOST_LINES

    def draw(axes: Axes) -> list[Mark]:
        marks = drawing.dots(axes, entries, "MiB") if many else drawing.bars(axes, silos, entries, "MiB")
        if many:
            axes.set_xlim(left=0)
        drawing.logarithmic_if_wide(axes, [value for _, _, by_silo in entries for value in by_silo.values()])
        return marks

    rows = len(entries) * 3 if many else len(silos)
    height = max(2.2, 0.9 + rows * (0.18 + (0 if many else 0.13 * len(entries))))
    panel = Panel("updates of all rounds", "left the silo (MiB)", "method" if many else "silo", draw, height, _WIDE)
    caption = "What each silo sent in a whole run: size of its serialized messages, mean over seeds."
    caption += _others(results, entries, "Nothing")
    labels = {position: label for position, label, _ in entries}
    return FigureSpec("sent", "What left each silo", caption, [panel] if entries else [], labels)


def _seconds(results: Results) -> FigureSpec:
    labels = [entry.label for entry in results.entries]
    spent = [results.seconds(entry) for entry in results.entries]

    def draw(axes: Axes) -> list[Mark]:
        colors = [drawing.line_style(position)["color"] for position in range(len(labels))]
        training, rest = zip(*spent, strict=True)
        axes.barh(range(len(labels)), training, height=0.6, color=colors)
        axes.barh(range(len(labels)), rest, left=training, height=0.6, color=colors, alpha=0.4)
        drawing.name_rows(axes, labels)
        return [
            (pair[0], position, f"{label}: training {pair[0]:.0f} s, rest {pair[1]:.0f} s")
            for position, (label, pair) in enumerate(zip(labels, spent, strict=True))
        ]

    panel = Panel("all rounds", "seconds", "method", draw, max(1.8, 0.9 + 0.34 * len(labels)), _WIDE)
    caption = (
        "Solid: training, in silos and, where a method trains there, at the coordinator; pale: messages, aggregation "
        "and validation. Mean over seeds; without start-up."
    )
    return FigureSpec("seconds", "Time", caption, [panel] if any(map(sum, spent)) else [])


def _tests(results: Results) -> FigureSpec:
    silos, averages, rows = results.distinct_silos, results.averages, len(results.entries)
    scored = _of_entries(
        results, lambda label: {name: s.mean for name in [*silos, *averages] if (s := results.score(label, name))}
    )
    axis = f"test {_scores_axis(results)}"
    if len(silos) > _MOST_LINES:
        height = max(2.2, 0.9 + 0.55 * rows)
        by_silo = [(n, label, {name: of[name] for name in of if name in silos}) for n, label, of in scored]
        panels = [
            Panel("a dot for each silo", axis, "method", partial(drawing.dots, rows=by_silo, unit=""), height, _WIDE),
            Panel("averages", axis, "", partial(_with_intervals, results, averages), 2.2 + 0.08 * rows, _WIDE),
        ]
        caption = f"{len(silos)} silos; the upright bar is their mean."
    else:
        columns = [*silos, *averages]
        draw, height = partial(_with_intervals, results, columns), max(2.2, 0.9 + len(columns) * (0.25 + 0.05 * rows))
        panels = [Panel("at the best round by validation", axis, "silo", draw, height, _WIDE)]
        caption = "At the round that is best by validation."
    caption += " Lines are 95 % intervals (see Results)."
    return FigureSpec("tests", "Test score per silo", caption, panels if scored else [], _legend(results))


def _with_intervals(results: Results, columns: Sequence[str], axes: Axes) -> list[Mark]:
    """Draw every entry's score in every column, with its 95 % interval."""
    step, marks = 0.7 / max(1, len(results.entries)), []
    for position, entry in enumerate(results.entries):
        for line, column in enumerate(columns):
            if (score := results.score(entry.label, column)) is None:
                continue
            place, interval = line - 0.35 + (position + 0.5) * step, results.interval(entry, column)
            style = drawing.line_style(position) | {"linestyle": "none"}
            if interval is not None:
                gid = drawing.artist_name(position, f"interval{line}")
                axes.plot(interval, [place, place], color=style["color"], linewidth=1, gid=gid)
            axes.plot([score.mean], [place], markersize=4, gid=drawing.artist_name(position, f"score{line}"), **style)
            suffix = f" ({interval_text(interval)})" if interval else ""
            marks.append((score.mean, place, f"{column}, {entry.label}: {score.text}{suffix}"))
    for line in range(1, len(columns)):
        axes.axhline(line - 0.5, color=drawing.GRID, linewidth=0.6)
    drawing.name_rows(axes, columns)
    return marks
