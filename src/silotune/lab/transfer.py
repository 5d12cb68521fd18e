"""`transfer` scores runs' tuned parts on each other's tasks, for Python and `silotune transfer`; `TransferResult`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from silotune.core.files import make_folder
from silotune.core.notebook import html_table
from silotune.errors import InputError, require_unused
from silotune.lab.report.transfer_matrices import RunFacts, transfer_figure, write_transfer_csv
from silotune.lab.transfer_models import alpha_of, describe_differences, open_models
from silotune.lab.transfer_scores import TASK_TYPES, Matrix, TransferModel, TransferScore, WhoseHead, exchange, matrix

if TYPE_CHECKING:
    import pandas

    from silotune.runs.run_result import Run


def transfer(
    runs: Iterable[str | Path | Run],
    out: str | Path,
    *,
    head: WhoseHead = "target",
    types: Mapping[str, str] = {},
    status: Callable[[str], None] = lambda _: None,
) -> TransferResult:
    """Evaluate each run's tuned parts on every other run's task, without training.

    Args:
        runs: finished runs or their folders, one per task (and method, tuner, seed).
        out: a new or empty folder for `transfer.csv` and `transfer.png`.
        head: whose head reads the labels: the `target`'s, or the `source`'s where the numbers of labels agree.
        types: task → type, beside those of GLUE's tasks.
        status: called with every step in words.
    """
    folder = Path(out)
    require_unused(folder, "--out")
    if head not in get_args(WhoseHead):
        raise InputError(f"transfer.head: must be target or source (got {head!r})")
    folders = [Path(run) if isinstance(run, (str, Path)) else run.folder for run in runs]
    if len(folders) < 2:
        raise InputError(f"transfer: at least 2 finished runs are needed (got {len(folders)})")
    kinds = {**TASK_TYPES, **types}
    groups = open_models(folders, head, lambda name: status(f"opened {name}"))
    scores: dict[str, list[TransferScore]] = {}
    for label, models in groups.items():
        scores[label] = []
        for cell in exchange(models, head):
            status(f"{label}: {cell.source} on {cell.target}")
            scores[label].append(cell)
    notes = []
    for label, models in groups.items():
        if not any(cell.source != cell.target for cell in scores[label]):
            raise InputError(
                f"transfer.head=source: {label} has no two tasks with equally many labels; allowed: target"
            )
        notes += [*_differing(models, scores[label]), *filter(None, [describe_differences(label, models)])]
    matrices = tuple(matrix(label, cells, kinds) for label, cells in scores.items())
    make_folder(folder, f"--out {folder}")
    settings = {
        label: (models[0].federation.config.method.name, models[0].federation.config.tuner.name, scores[label])
        for label, models in groups.items()
    }
    facts = {
        (label, model.task.name, model.seed): RunFacts(
            model.majority(), model.federation.config.train.lr, alpha_of(model.federation.config)
        )
        for label, models in groups.items()
        for model in models
    }
    files = (
        write_transfer_csv(settings, facts, folder / "transfer.csv", kinds),
        transfer_figure(matrices, folder / "transfer.png"),
    )
    return TransferResult(folder, matrices, tuple(notes), files)


def _differing(models: Sequence[TransferModel], cells: Sequence[TransferScore]) -> list[str]:
    """Note scores that differ from the summary: another machine or precision may change a few predictions."""
    notes = []
    for model in models:
        own_score = next(c.absolute for c in cells if c.source == c.target == model.task.name and c.seed == model.seed)
        if abs(own_score - model.reported) > 1e-6:
            notes.append(f"note: {model.name} scores {own_score:.2f} here, its summary says {model.reported:.2f}")
    return notes


@dataclass(frozen=True, repr=False)
class TransferResult:
    """Matrices of scores: of every source's tuned parts (rows) on every target's task (columns).

    Attributes:
        folder: the folder of the files.
        matrices: one for each method and tuner.
        notes: what differs between the runs, or between their scores now and then.
        files: `transfer.csv` and `transfer.png`.
    """

    folder: Path
    matrices: tuple[Matrix, ...]
    notes: tuple[str, ...]
    files: tuple[Path, Path]

    def to_pandas(self) -> pandas.DataFrame:
        """Return `transfer.csv`: a row for every source, target and seed."""
        import pandas

        return pandas.read_csv(self.files[0])

    def __repr__(self) -> str:
        lines = [
            f"{one.label}: {_percent(one.mean())} between two tasks, {_percent(one.mean(alike=True))} of the same type"
            for one in self.matrices
        ]
        return "\n".join([f"TransferResult({str(self.folder)!r}): mean relative score", *lines])

    def _repr_html_(self) -> str:
        """Return the tables that a notebook shows."""
        return "".join(
            html_table(f"{one.label}: {MATRIX_TITLE}", ["source ↓ target →", *one.tasks], matrix_rows(one))
            for one in self.matrices
        )


MATRIX_TITLE = "absolute (% of the target's own score)"


def matrix_rows(scores: Matrix) -> list[list[str]]:
    """Return a matrix as texts: a row for each source, which begins with its name."""
    rows = []
    for source in scores.tasks:
        cells = [source]
        for target in scores.tasks:
            absolute, relative = (values.get((source, target)) for values in (scores.absolute, scores.relative))
            share = "–" if relative is None else f"{relative:.0f}"
            cells.append("–" if absolute is None else f"{absolute:.1f} ({share})")
        rows.append(cells)
    return rows


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"
