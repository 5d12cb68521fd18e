"""The command `silotune data`: a setting's silos and rows; with `--show`, what a row becomes, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from silotune.cli.app import BEFORE, app
from silotune.cli.console import JsonOption, Overrides, Source, console, new_table, say
from silotune.core.notebook import COLORS, wrap_label
from silotune.errors import unknown_name_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from silotune.config import Config
    from silotune.data.rows import SiloData
    from silotune.runs.build.shown_rows import ShownRow

_LONG = {"cut": "cut at", "windows": "in windows of", "refuse": "refused above"}

_MOST_LABELS = 12
"""Labels whose shares a line shows."""


@app.command(rich_help_panel=BEFORE)
def data(
    source: Source,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, max=1000, help="Show this many training rows of each silo.")] = 0,
    silo: Annotated[str | None, typer.Option(help="Only this silo.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the silos' shares of labels into a PNG or SVG file.", metavar="FILE")
    ] = None,
    templates: Annotated[
        bool,
        typer.Option("--templates", help="Score the chat template and the plain one with the untouched backbone."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the silos' rows: labels, lengths, duplicates and warnings; with --show the tokens of single rows.

    With --show a row is tokenized as in training: by the backbone's tokenizer, with the head's template, and cut to
    train.max_length. Tokens that the loss counts are marked.
    """
    from silotune.data.loading import load_silos
    from silotune.data.row_checks import row_warnings, silos_warnings
    from silotune.errors import InputError
    from silotune.runs.build.resolve import read_config
    from silotune.runs.build.shown_rows import describe_silo, token_lengths

    if picture is not None and (picture.suffix.lower() not in (".png", ".svg") or not picture.parent.is_dir()):
        raise InputError(f"--picture {picture}: must be a .png or .svg file in a folder that exists")
    config = read_config(source, overrides or [])
    silos = {item.name: item for item in load_silos(config)}
    if silo is not None and silo not in silos:
        raise unknown_name_error("silo", silo, silos)
    selection = [item for name, item in silos.items() if silo in (None, name)]
    if templates:
        _compare_templates(config, selection, as_json)
        return
    described: dict[str, Any] = {item.name: describe_silo(item) for item in selection}
    notes = [] if config.partition.name != "none" else silos_warnings(selection)
    notes += [warning for item in selection for warning in row_warnings(item, described[item.name])]
    try:
        lengths, cut = token_lengths(config, selection)
        for name, tokens in lengths.items():
            described[name]["tokens"] = tokens
        notes += cut
    except InputError as error:
        notes.append(str(error))
    if picture is not None:
        _draw_labels(described, picture)
    examples = _shown(config, list(silos.values()), selection, show, notes) if show else {}
    if as_json:
        for name, rows in examples.items():
            described[name]["shown"] = [asdict(row) for row in rows]
        typer.echo(json.dumps({"silos": described, "warnings": notes}, indent=1, ensure_ascii=False))
        return
    console.print(_rows_table(described))
    console.print(_lengths_table(described, config.train.max_length, config.data.long_texts))
    console.print(_repeats_table(described))
    for name, entry in described.items():
        if windows := entry.get("tokens", {}).get("windows"):
            say(
                f"windows of {name}'s training rows: {windows['longer']:,} of {windows['rows']:,} rows are longer; "
                f"{windows['passes']:.1f} forward passes a row, {windows['trained']:.1f} in training; "
                f"{windows['work']:.1f} and {windows['trained_work']:.1f} times the tokens of cut rows"
            )
        if labels := entry["label_rows"]["train"]:
            say(f"labels of {name}'s training rows: {_shares(labels)}")
        if numbers := (entry["numbers"] or {}).get("train"):
            say(
                f"numbers of {name}'s training rows: {numbers['least']:g} to {numbers['greatest']:g}, mean "
                f"{numbers['mean']:.4g}, standard deviation {numbers['deviation']:.4g}"
            )
    for note in notes:
        say(f"warning: {note}")
    if _may_share_head(config, list(silos.values())):
        say(
            f"proposed: head.scope=shared (all {len(silos)} silos have one task, and each trains a head of its own now)"
        )
    if picture is not None:
        say(f"shares of labels: {picture}")
    for name, rows in examples.items():
        for number, row in enumerate(rows, start=1):
            _print_row(name, number, row)


def _may_share_head(config: Config, silos: list[SiloData]) -> bool:
    """Return whether silos of one task train private heads, though their method could share one."""
    from silotune.runs.build.resolve import make_method
    from silotune.runs.build.validation import shares_head

    now, then = make_method(config), make_method(config.replace(head={"scope": "shared"}))
    one_task = len(silos) > 1 and len({silo.task.name for silo in silos}) == 1
    return one_task and now.setting.head.has_tensors and shares_head(then) and not shares_head(now)


def _compare_templates(config: Config, silos: list[SiloData], as_json: bool) -> None:
    """Print what each template scores on rows that are not test rows, and which one is better."""
    from silotune.core.numeric import score_text
    from silotune.data.tasks import metric_title
    from silotune.runs.backbone_scores import score_templates

    comparison = score_templates(config, silos)
    if as_json:
        typer.echo(json.dumps({**asdict(comparison), "split": comparison.split}, indent=1, ensure_ascii=False))
        return
    names = ["chat", "plain"]
    table = new_table(f"untouched backbone on {comparison.split} rows", ("silo", "metric"), names)
    for silo in silos:
        scores = comparison.silos[silo.name]
        title = metric_title(silo.task.metric, silo.task.positive)
        table.add_row(*map(escape, [silo.name, title, *(score_text(scores[name]) for name in names)]))
    table.add_section()
    table.add_row("mean", "", *(score_text(comparison.mean(name)) for name in names))
    console.print(table)
    why = "before training; after it the order may be another" if comparison.clear else "no clear difference"
    say(f"proposed: head.template={comparison.proposed} ({why})")


def _draw_labels(described: dict[str, Any], picture: Path) -> None:
    """Draw a bar for every silo, divided by label; silos of one task stand together, as their labels are the same."""
    from matplotlib.figure import Figure

    from silotune.errors import InputError, file_errors

    tasks: dict[str, dict[str, dict[str, int]]] = {}
    for name, entry in described.items():
        if labels := entry["label_rows"]["train"]:
            tasks.setdefault(entry["task"], {})[name] = labels
    if not tasks:
        raise InputError("--picture: rows of these silos have no labels")
    heights = [1.1 + 0.34 * len(silos) for silos in tasks.values()]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (task, silos) in zip(panels, tasks.items(), strict=True):
        _draw_task(axes, task, silos)
    panels[-1].set_xlabel("share of the training rows (%)", fontsize=9)
    with file_errors(f"--picture {picture}: cannot be written"):
        figure.savefig(picture, dpi=150)


def _draw_task(axes: Axes, task: str, silos: Mapping[str, Mapping[str, int]]) -> None:
    import pandas

    frame = pandas.DataFrame(silos).T.fillna(0)
    frame = frame[frame.sum().sort_values(ascending=False, kind="stable").index]
    if len(frame.columns) > len(COLORS):
        rare = frame.columns[len(COLORS) - 1 :]
        frame = frame.drop(columns=rare).assign(**{"all others": frame[rare].sum(axis=1)})
    shares = 100 * frame.div(frame.sum(axis=1).clip(lower=1), axis=0)
    starts = shares.cumsum(axis=1) - shares
    for color, label in zip(COLORS, shares, strict=False):
        bars = axes.barh(
            range(len(silos)), shares[label], 0.7, starts[label], label=label, color=color, edgecolor="white"
        )
        texts = [f"{share:.0f}" if share >= 6 else "" for share in shares[label]]
        axes.bar_label(bars, texts, label_type="center", fontsize=8, color="white")
    names = [f"{wrap_label(name)} ({sum(counts.values()):,})" for name, counts in silos.items()]
    axes.set_yticks(range(len(silos)), labels=names, fontsize=8)
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_title(task, fontsize=10, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _shown(
    config: Config, silos: list[SiloData], selection: list[SiloData], number: int, notes: list[str]
) -> dict[str, list[ShownRow]]:
    """Tokenize rows of the chosen silos, with the template that all silos' rows need; add warnings to the notes."""
    from silotune.data.row_checks import token_warnings
    from silotune.runs.build.model import model_for
    from silotune.runs.build.shown_rows import show_rows

    _, context = model_for(config, silos)
    backbone = context.backbone
    tokenize = context.head.row_tokenizer(backbone, context.max_length)
    notes += [line for item in selection for line in token_warnings(item, backbone.tokenizer, tokenize)]
    return {item.name: show_rows(backbone.tokenizer, tokenize, item, number) for item in selection}


def _rows_table(described: dict[str, Any]) -> Table:
    from silotune.data.tasks import metric_title

    title = "1 silo" if len(described) == 1 else f"{len(described)} silos"
    table = new_table(title, ("silo", "task", "format", "metric"), ("train", "validation", "test"))
    for name, entry in described.items():
        counts = (f"{number:,}" for number in entry["rows"].values())
        metric = metric_title(entry["metric"], entry["positive"])
        table.add_row(name, entry["task"], entry["format"], escape(metric), *counts)
    return table


def _shares(labels: dict[str, int]) -> str:
    """Return the labels with their shares, the most frequent first."""
    total, ordered = sum(labels.values()), sorted(labels.items(), key=lambda item: -item[1])
    listing = ", ".join(f"{label} {100 * number / total:.0f} %" for label, number in ordered[:_MOST_LABELS])
    return f"{listing}, … ({len(ordered)})" if len(ordered) > _MOST_LABELS else listing


def _lengths_table(described: dict[str, Any], limit: int, long: str) -> Table:
    rooms = {entry["tokens"]["room"] for entry in described.values() if "tokens" in entry} - {None, limit}
    prompts = "".join(f", their prompts at {room}" for room in rooms)
    columns = (
        "characters\nmedian",
        "\n95 %",
        "\nlongest",
        "tokens\nmedian",
        "\n95 %",
        "\nlongest",
        "\ncut" if long == "cut" else "\nlonger",
    )
    table = new_table(f"lengths of training rows; {_LONG[long]} {limit} tokens{prompts}", ["\nsilo"], columns)
    for name, entry in described.items():
        tokens = entry.get("tokens")
        cut = "–" if tokens is None else f"{tokens['cut']:.0f} %"
        table.add_row(name, *_spread(entry["characters"]["train"]), *_spread(tokens), cut)
    return table


def _repeats_table(described: dict[str, Any]) -> Table:
    columns = ("duplicates", "in validation", "in test")
    table = new_table("training rows that are there twice", ["silo"], columns)
    for name, entry in described.items():
        table.add_row(name, *map(str, [entry["duplicates"]["train"], *entry["shared"].values()]))
    return table


def _spread(numbers: dict[str, Any] | None) -> list[str]:
    return ["–"] * 3 if numbers is None else [f"{numbers[key]:,}" for key in ("median", "p95", "maximum")]


def _print_row(silo: str, number: int, row: ShownRow) -> None:
    say(f"\nsilo {silo}, training row {number}")
    for text in row.texts:
        say(f"  {text}")
    trained = sum(token.trained for token in row.tokens)  # none where a head reads labels, not tokens
    say(f"  → {row.target}")
    say(f"  {len(row.tokens)} tokens{f', {trained} of them trained' if trained else ''}")
    say(f"  {'':>5} {'id':>7}  {'input':<8} {'trained  ' if trained else ''}token")
    for place, token in enumerate(row.tokens):
        mark = f"{'yes' if token.trained else '':<8} " if trained else ""
        say(f"  {place:>5} {token.id:>7}  {token.input:<8} {mark}{token.text!r}")
