"""`silotune transfer`: every run's tuned parts on every other run's task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.markup import escape
from rich.table import Table

from silotune.cli.app import app
from silotune.cli.console import console, say
from silotune.core.files import make_folder
from silotune.errors import InputError, require_unused, unknown

if TYPE_CHECKING:
    from silotune.evaluation.transfer import Matrix, TransferModel, WhoseHead


_KEYS = ("transfer.head", "transfer.types")


@app.command()
def transfer(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Finished run folders, one per task (and method, tuner, seed); transfer.head=target|source; "
            "transfer.types='{TASK: TYPE}'.",
            metavar="RUN…",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Where transfer.csv and transfer.png go.")] = None,
) -> None:
    """Judge each run's tuned parts on every other run's task, without training: absolute and relative matrices.

    The target's own head reads the labels (transfer.head=target), or the source's where label counts agree
    (transfer.head=source).
    """
    if out is None:
        raise InputError("--out: is missing; transfer needs a folder for transfer.csv and transfer.png")
    require_unused(out, "--out")
    head, types, folders = _words(runs)
    if len(folders) < 2:
        raise InputError(f"transfer: at least 2 finished runs are needed (got {len(folders)})")

    from silotune.evaluation.transfer import exchange, matrix
    from silotune.experiments.report.transfer_matrices import RunFacts, transfer_figure, write_transfer_csv
    from silotune.experiments.transfer import alpha_of, mixed, open_models

    with console.status("opening runs") as status:
        groups = open_models(folders, head, lambda name: status.update(f"opened {name}"))
        cells = {}
        for label, models in groups.items():
            found = []
            for cell in exchange(models, head):
                status.update(f"{label}: {cell.source} on {cell.target}")
                found.append(cell)
            cells[label] = found
    for label, models in groups.items():
        if not any(cell.source != cell.target for cell in cells[label]):
            raise InputError(
                f"transfer.head=source: {label} has no two tasks with equally many labels; allowed: target"
            )
        _say_differing(models, cells[label])
        if line := mixed(label, models):
            say(line)
    matrices = [matrix(label, found, types) for label, found in cells.items()]
    make_folder(out, f"--out {out}")
    settings = {
        label: (models[0].federation.config.method.name, models[0].federation.config.tuner.name, cells[label])
        for label, models in groups.items()
    }
    facts = {
        (label, model.task.name, model.seed): RunFacts(
            model.majority(), model.federation.config.train.lr, alpha_of(model.federation.config)
        )
        for label, models in groups.items()
        for model in models
    }
    table = write_transfer_csv(settings, facts, out / "transfer.csv", types)
    figure = transfer_figure(matrices, out / "transfer.png")
    for found_matrix in matrices:
        console.print(_table(found_matrix))
    console.print(_summary(matrices))
    say(f"wrote {table}, {figure}")


def _words(words: Sequence[str]) -> tuple[WhoseHead, dict[str, str], list[Path]]:
    """Whose head, task → type, and the run folders."""
    from silotune.config.merging import parse_word
    from silotune.evaluation.transfer import TASK_TYPES, WhoseHead

    found: dict[str, Any] = {"transfer.head": "target", "transfer.types": {}}
    folders = []
    for word in words:
        if not word.startswith("transfer.") or "=" not in word:
            folders.append(Path(word))
            continue
        key, value = parse_word(word)
        if key not in _KEYS:
            raise unknown("key", key, _KEYS)
        found[key] = value
    head, types = found["transfer.head"], found["transfer.types"]
    if head not in get_args(WhoseHead):
        raise InputError(f"transfer.head: must be target or source (got {head!r})")
    if not isinstance(types, dict) or not all(isinstance(word, str) for word in (*types, *types.values())):
        raise InputError(f"transfer.types: must map tasks to types, e.g. '{{SST-2: sentiment}}' (got {types!r})")
    return cast("WhoseHead", head), {**TASK_TYPES, **types}, folders


def _say_differing(models: Sequence[TransferModel], cells: Sequence[Any]) -> None:
    """Another machine or precision may decide a few rows otherwise: then say so."""
    for model in models:
        own = next(c.absolute for c in cells if c.source == c.target == model.task.name and c.seed == model.seed)
        if abs(own - model.reported) > 1e-6:
            say(f"note: {model.name} scores {own:.2f} here, its summary says {model.reported:.2f}")


def _table(found: Matrix) -> Table:
    table = Table(title=escape(f"{found.label}: absolute (% of the target's own score)"))
    table.add_column("source ↓ target →")
    for task in found.tasks:
        table.add_column(escape(task), justify="right")
    for source in found.tasks:
        row = []
        for target in found.tasks:
            absolute, relative = (values.get((source, target)) for values in (found.absolute, found.relative))
            share = "–" if relative is None else f"{relative:.0f}"
            row.append("–" if absolute is None else f"{absolute:.1f} ({share})")
        table.add_row(escape(source), *row)
    return table


def _summary(matrices: Sequence[Matrix]) -> Table:
    table = Table(title="relative score between two tasks, mean (%)")
    table.add_column("")
    for column in ("all", "same type", "other type", "|A on B − B on A|"):
        table.add_column(column, justify="right")
    for found in matrices:
        values = (found.mean(), found.mean(alike=True), found.mean(alike=False), found.asymmetry())
        table.add_row(escape(found.label), *("–" if value is None else f"{value:.1f}" for value in values))
    return table
