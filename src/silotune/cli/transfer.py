"""The command `silotune transfer`: scores of every run's tuned parts on every other run's task."""

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
from silotune.errors import InputError, require_unused, unknown_name_error

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
    """Evaluate each run's tuned parts on every other run's task, without training: absolute and relative matrices.

    transfer.head=target reads the labels with the target run's head; transfer.head=source with the source's, where the
    numbers of labels agree.
    """
    if out is None:
        raise InputError("--out: is missing; transfer needs a folder for transfer.csv and transfer.png")
    require_unused(out, "--out")
    head, types, folders = _parse_words(runs)
    if len(folders) < 2:
        raise InputError(f"transfer: at least 2 finished runs are needed (got {len(folders)})")

    from silotune.evaluation.transfer import exchange, matrix
    from silotune.experiments.report.transfer_matrices import RunFacts, transfer_figure, write_transfer_csv
    from silotune.experiments.transfer_models import alpha_of, describe_differences, open_models

    with console.status("opening runs") as status:
        groups = open_models(folders, head, lambda name: status.update(f"opened {name}"))
        scores_by_group = {}
        for label, models in groups.items():
            scores = []
            for cell in exchange(models, head):
                status.update(f"{label}: {cell.source} on {cell.target}")
                scores.append(cell)
            scores_by_group[label] = scores
    for label, models in groups.items():
        if not any(cell.source != cell.target for cell in scores_by_group[label]):
            raise InputError(
                f"transfer.head=source: {label} has no two tasks with equally many labels; allowed: target"
            )
        _say_differing(models, scores_by_group[label])
        if note := describe_differences(label, models):
            say(note)
    matrices = [matrix(label, scores, types) for label, scores in scores_by_group.items()]
    make_folder(out, f"--out {out}")
    settings = {
        label: (models[0].federation.config.method.name, models[0].federation.config.tuner.name, scores_by_group[label])
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
    for group_matrix in matrices:
        console.print(_table(group_matrix))
    console.print(_summary(matrices))
    say(f"wrote {table}, {figure}")


def _parse_words(words: Sequence[str]) -> tuple[WhoseHead, dict[str, str], list[Path]]:
    """Parse the arguments into (whose head, task to type, run folders)."""
    from silotune.config.trees import parse_word
    from silotune.evaluation.transfer import TASK_TYPES, WhoseHead

    options: dict[str, Any] = {"transfer.head": "target", "transfer.types": {}}
    folders = []
    for word in words:
        if not word.startswith("transfer.") or "=" not in word:
            folders.append(Path(word))
            continue
        key, value = parse_word(word)
        if key not in _KEYS:
            raise unknown_name_error("key", key, _KEYS)
        options[key] = value
    head, types = options["transfer.head"], options["transfer.types"]
    if head not in get_args(WhoseHead):
        raise InputError(f"transfer.head: must be target or source (got {head!r})")
    if not isinstance(types, dict) or not all(isinstance(word, str) for word in (*types, *types.values())):
        raise InputError(f"transfer.types: must map tasks to types, e.g. '{{SST-2: sentiment}}' (got {types!r})")
    return cast("WhoseHead", head), {**TASK_TYPES, **types}, folders


def _say_differing(models: Sequence[TransferModel], cells: Sequence[Any]) -> None:
    """Note scores that differ from the summary: another machine or precision may change a few predictions."""
    for model in models:
        own_score = next(c.absolute for c in cells if c.source == c.target == model.task.name and c.seed == model.seed)
        if abs(own_score - model.reported) > 1e-6:
            say(f"note: {model.name} scores {own_score:.2f} here, its summary says {model.reported:.2f}")


def _table(matrix: Matrix) -> Table:
    table = Table(title=escape(f"{matrix.label}: absolute (% of the target's own score)"))
    table.add_column("source ↓ target →")
    for task in matrix.tasks:
        table.add_column(escape(task), justify="right")
    for source in matrix.tasks:
        row = []
        for target in matrix.tasks:
            absolute, relative = (values.get((source, target)) for values in (matrix.absolute, matrix.relative))
            share = "–" if relative is None else f"{relative:.0f}"
            row.append("–" if absolute is None else f"{absolute:.1f} ({share})")
        table.add_row(escape(source), *row)
    return table


def _summary(matrices: Sequence[Matrix]) -> Table:
    table = Table(title="relative score between two tasks, mean (%)")
    table.add_column("")
    for column in ("all", "same type", "other type", "|A on B − B on A|"):
        table.add_column(column, justify="right")
    for matrix in matrices:
        values = (matrix.mean(), matrix.mean(alike=True), matrix.mean(alike=False), matrix.asymmetry())
        table.add_row(escape(matrix.label), *("–" if value is None else f"{value:.1f}" for value in values))
    return table
