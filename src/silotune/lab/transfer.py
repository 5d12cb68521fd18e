"""Score runs' tuned parts on each other's tasks, from Python or the command line: matrices, tables and heatmaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from silotune.core.files import make_folder, write_text
from silotune.errors import InputError, require_unused
from silotune.lab.report.drawing import INK, heatmap
from silotune.lab.report.table_files import as_html, as_latex
from silotune.lab.report.tables import ResultTable, plain_table
from silotune.lab.transfer_models import TransferModel, WhoseHead, alpha_of, exchange, open_models

if TYPE_CHECKING:
    import pandas

    from silotune.runs.run_result import Run

SENTIMENT, INFERENCE, PARAPHRASE = "sentiment analysis", "natural language inference", "paraphrase identification"

TASK_TYPES: Mapping[str, str] = {
    "SST-2": SENTIMENT,
    **dict.fromkeys(("RTE", "QNLI", "MNLI"), INFERENCE),
    **dict.fromkeys(("MRPC", "QQP"), PARAPHRASE),
    "CoLA": "acceptability",
}
"""The types of GLUE's tasks, as in the paper's Table 1 (CoLA is not among its six)."""

OTHER = "other"

_CELL = 0.62  # inches


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
        out: a new or empty folder for `transfer.csv`, `transfer.tex` and `transfer.png`.
        head: whose head reads the labels: the `target`'s, or the `source`'s where the numbers of labels agree.
        types: task → type, beside those of GLUE's tasks.
        status: called with every step in words.
    """
    import pandas

    folder = Path(out)
    require_unused(folder, "--out")
    folders = [Path(run) if isinstance(run, (str, Path)) else run.folder for run in runs]
    if head not in get_args(WhoseHead):
        raise InputError(f"transfer.head: must be target or source (got {head!r})")
    if len(folders) < 2:
        raise InputError(f"transfer: at least 2 finished runs are needed (got {len(folders)})")
    kinds = {**TASK_TYPES, **types}
    groups = open_models(folders, head, lambda name: status(f"opened {name}"))
    frames = {label: score_frame(label, models, head, kinds, status) for label, models in groups.items()}
    matrices = tuple(matrix(label, frame, kinds) for label, frame in frames.items())
    make_folder(folder, f"--out {folder}")
    files = tuple(folder / f"transfer.{kind}" for kind in ("csv", "tex", "png"))
    pandas.concat(frames.values()).to_csv(files[0], index=False, float_format="%.6f", lineterminator="\r\n")
    tables = [*(one.table() for one in matrices), summary_table(matrices)]
    write_text(files[1], "\n".join(f"% {table.title}\n{as_latex(table)}" for table in tables))
    draw_matrices(matrices, files[2])
    notes = [note for label, models in groups.items() for note in _notes(label, models, frames[label])]
    return TransferResult(folder, matrices, tuple(notes), files)


def score_frame(
    label: str,
    models: Sequence[TransferModel],
    head: WhoseHead = "target",
    types: Mapping[str, str] = TASK_TYPES,
    status: Callable[[str], None] = lambda _: None,
) -> pandas.DataFrame:
    """Return the rows of `transfer.csv` of one method and tuner: one for every source, target and seed.

    Scores are in percent; `relative` is of the target's own score, and NaN if that is 0.
    """
    import pandas

    rows = []
    for source, target, absolute in exchange(models, head):
        status(f"{label}: {source.task.name} on {target.task.name}")
        row: dict[str, Any] = {"source": source.task.name, "target": target.task.name, "metric": target.task.metric}
        row |= {"absolute": absolute, "relative": float("nan"), "method": target.config.method.name}
        row |= {"tuner": target.config.tuner.name, "setting": label, "seed": target.seed}
        row |= {"majority": target.majority()}
        ends = {"source": source, "target": target}
        row |= {f"{end}_type": types.get(model.task.name, OTHER) for end, model in ends.items()}
        row |= {f"{end}_lr": f"{model.config.train.lr:g}" for end, model in ends.items()}
        rows.append(row | {f"{end}_alpha": _alpha_text(model) for end, model in ends.items()})
    frame = pandas.DataFrame(rows).sort_values(["source", "target", "seed"]).astype({"majority": float})
    own = frame["absolute"].where((frame["source"] == frame["target"]) & (frame["absolute"] != 0))
    frame["relative"] = 100 * frame["absolute"] / own.groupby([frame["target"], frame["seed"]]).transform("max")
    return frame


def _alpha_text(model: TransferModel) -> str:
    alpha = alpha_of(model.config)
    return "" if alpha is None else f"{alpha:g}"


def _notes(label: str, models: Sequence[TransferModel], frame: pandas.DataFrame) -> Iterator[str]:
    """Note scores that differ from the summary, as on another machine, and the rates and skews of unlike runs."""
    own = frame[frame["source"] == frame["target"]].set_index(["target", "seed"])["absolute"]
    for model in models:
        now, then = own[model.task.name, model.seed], float(model.run.summary["average"])
        if abs(now - then) > 1e-6:
            yield f"note: {model.run.folder} scores {now:.2f} here, its summary says {then:.2f}"
    differing = []
    for key, column in (("train.lr", "target_lr"), ("partition.alpha", "target_alpha")):
        if frame[column].nunique() > 1:
            values = frame.groupby("target")[column].unique()
            texts = (f"{task} {'/'.join(value or 'none' for value in of_task)}" for task, of_task in values.items())
            differing.append(f"{key} ({', '.join(texts)})")
    if differing:
        yield f"{label}: the runs differ in {' and '.join(differing)}"


@dataclass(frozen=True, eq=False)
class Matrix:
    """The scores of one method, as means over seeds; `relative` to the target's own score.

    Scores are in percent, with a row for each source and a column for each target; NaN where there is none. `types`
    has the type of each task, by which the tasks are ordered.
    """

    label: str
    types: Mapping[str, str]
    absolute: pandas.DataFrame
    relative: pandas.DataFrame
    seeds: int

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, in the order of rows and columns."""
        return tuple(self.types)

    def mean(self, alike: bool | None = None) -> float | None:
        """Return the mean relative score between tasks of the same type, of different types, or (None) of any.

        Pairs with a task of unknown type (`OTHER`) count only among any.
        """
        kinds = np.array(list(self.types.values()))
        counted = ~np.eye(len(kinds), dtype=bool)
        if alike is not None:
            known = kinds != OTHER
            counted &= np.logical_and.outer(known, known) & (np.equal.outer(kinds, kinds) == alike)
        return _mean(self.relative.where(counted))

    def asymmetry(self) -> float | None:
        """Return the mean of |A on B − B on A| over pairs of tasks, in points of relative score."""
        gaps = (self.relative - self.relative.T).abs()
        return _mean(gaps.where(~np.eye(len(gaps), dtype=bool)))

    def table(self) -> ResultTable:
        """Make the table: absolute scores with relative ones in parentheses."""
        rows = [
            (
                source,
                {
                    target: _cell(self.absolute.at[source, target], self.relative.at[source, target])
                    for target in self.tasks
                },
            )
            for source in self.tasks
        ]
        return plain_table(f"{self.label}: absolute (% of the target's own score)", rows, "source ↓ target →")


def _cell(absolute: float, relative: float) -> str:
    return "–" if np.isnan(absolute) else f"{absolute:.1f} ({'–' if np.isnan(relative) else f'{relative:.0f}'})"


def _mean(values: pandas.DataFrame) -> float | None:
    mean = float(values.stack().mean())
    return None if np.isnan(mean) else mean


def matrix(label: str, scores: pandas.DataFrame, types: Mapping[str, str] = TASK_TYPES) -> Matrix:
    """Make the matrix of one method's scores; tasks are in the order of `types`, unknown tasks last."""
    kinds = {name: types.get(name, OTHER) for name in scores["target"].unique()}
    order, names = list(dict.fromkeys([*types.values(), OTHER])), list(types)
    tasks = sorted(kinds, key=lambda name: (order.index(kinds[name]), names.index(name) if name in names else 0))
    absolute, relative = (
        scores.pivot_table(values, "source", "target", dropna=False).reindex(tasks, columns=tasks)
        for values in ("absolute", "relative")
    )
    return Matrix(label, {name: kinds[name] for name in tasks}, absolute, relative, scores["seed"].nunique())


def summary_table(matrices: Sequence[Matrix]) -> ResultTable:
    """Make the table of mean relative scores between tasks."""
    rows = []
    for one in matrices:
        means = {"all": one.mean(), "same type": one.mean(alike=True), "other type": one.mean(alike=False)}
        means["|A on B − B on A|"] = one.asymmetry()
        rows.append((one.label, {name: "–" if value is None else f"{value:.1f}" for name, value in means.items()}))
    return plain_table("relative score between two tasks, mean (%)", rows, "")


def draw_matrices(matrices: Sequence[Matrix], path: Path) -> Path:
    """Draw one row of heatmaps per matrix, relative and absolute scores, into a PNG file; lines lie between types.

    Relative scores share one scale centered at 100 (white: as good as the target's own model), absolute scores another.
    """
    from matplotlib.colors import Normalize, TwoSlopeNorm
    from matplotlib.figure import Figure

    side = _CELL * max(len(one.tasks) for one in matrices)
    names = 0.09 * max(len(task) for one in matrices for task in one.tasks)
    size = (2 * (side + names + 1.9), len(matrices) * (side + names + 1.0))
    figure = Figure(figsize=size, layout="constrained")
    reach = max([10.0, *(float(np.nanmax(abs(one.relative - 100).to_numpy(), initial=0)) for one in matrices)])
    low, high = (limit([limit(one.absolute) for one in matrices]) for limit in (np.nanmin, np.nanmax))
    scales: dict[str, dict[str, Any]] = {
        "relative": {"cmap": "BrBG", "norm": TwoSlopeNorm(100, 100 - reach, 100 + reach)},
        "absolute": {"cmap": "Purples", "norm": Normalize(low, max(high, low + 1))},
    }
    for line, one in zip(figure.subplots(len(matrices), 2, squeeze=False), matrices, strict=True):
        seeds = f" (mean of {one.seeds} seeds)" if one.seeds > 1 else ""
        for axes, (name, unit) in zip(
            line, (("relative", "% of the target's own score"), ("absolute", "score (%)")), strict=True
        ):
            table = getattr(one, name).to_numpy()
            image = heatmap(axes, table, one.tasks, one.tasks, _shown, bold_diagonal=True, **scales[name])
            axes.tick_params(axis="x", rotation=45)
            axes.set(xlabel="target", ylabel="source")
            axes.set_title(f"{one.label}{seeds}: {unit}", fontsize=9, loc="left")
            figure.colorbar(image, ax=axes, shrink=0.85)
            kinds = list(one.types.values())
            for position in range(1, len(kinds)):
                if kinds[position] != kinds[position - 1]:
                    axes.axhline(position - 0.5, color=INK, linewidth=1)
                    axes.axvline(position - 0.5, color=INK, linewidth=1)
    figure.savefig(path, dpi=150)
    return path


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


@dataclass(frozen=True, repr=False)
class TransferResult:
    """Matrices of scores: of every source's tuned parts (rows) on every target's task (columns).

    Attributes:
        folder: the folder of the files.
        matrices: one for each method and tuner.
        notes: what differs between the runs, or between their scores now and then.
        files: `transfer.csv`, `transfer.tex` and `transfer.png`.
    """

    folder: Path
    matrices: tuple[Matrix, ...]
    notes: tuple[str, ...]
    files: tuple[Path, ...]

    def to_pandas(self) -> pandas.DataFrame:
        """Return `transfer.csv`: a row for every source, target and seed."""
        import pandas

        return pandas.read_csv(self.files[0])

    def __repr__(self) -> str:
        table = summary_table(self.matrices)
        return f"TransferResult({str(self.folder)!r}): {table.title}\n{table.frame().to_string(index=False)}"

    def _repr_html_(self) -> str:
        return "".join(as_html(one.table()) for one in self.matrices)
