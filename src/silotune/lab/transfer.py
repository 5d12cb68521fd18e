"""Score runs' tuned parts on each other's tasks, from Python or the command line: a matrix, a table and heatmaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from silotune.core.files import make_folder
from silotune.core.notebook import COLORS, html_table
from silotune.core.numeric import mean_ignoring_none
from silotune.errors import InputError, require_unused
from silotune.lab.report.drawing import INK, heatmap
from silotune.lab.transfer_models import (
    TransferModel,
    TransferScore,
    WhoseHead,
    alpha_of,
    describe_differences,
    exchange,
    open_models,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

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

_TYPE_COLORS = {SENTIMENT: "#2563c9", INFERENCE: "#1f8a4c", PARAPHRASE: "#c8323c", OTHER: "#5a6673"}
"""Colors of task types as in the paper's figures (blue, green, red)."""

MATRIX_TITLE = "absolute (% of the target's own score)"

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
        out: a new or empty folder for `transfer.csv` and `transfer.png`.
        head: whose head reads the labels: the `target`'s, or the `source`'s where the numbers of labels agree.
        types: task → type, beside those of GLUE's tasks.
        status: called with every step in words.
    """
    import pandas

    folder = Path(out)
    require_unused(folder, "--out")
    if head not in get_args(WhoseHead):
        raise InputError(f"transfer.head: must be target or source (got {head!r})")
    folders = [Path(run) if isinstance(run, (str, Path)) else run.folder for run in runs]
    if len(folders) < 2:
        raise InputError(f"transfer: at least 2 finished runs are needed (got {len(folders)})")
    kinds = {**TASK_TYPES, **types}
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    matrices = []
    for label, models in open_models(folders, head, lambda name: status(f"opened {name}")).items():
        scores = []
        for cell in exchange(models, head):
            status(f"{label}: {cell.source} on {cell.target}")
            scores.append(cell)
        if not any(cell.source != cell.target for cell in scores):
            raise InputError(
                f"transfer.head=source: {label} has no two tasks with equally many labels; allowed: target"
            )
        notes += [*_differing(models, scores), *filter(None, [describe_differences(label, models)])]
        matrices.append(matrix(label, scores, kinds))
        rows += _rows(label, models, scores, kinds)
    make_folder(folder, f"--out {folder}")
    files = (folder / "transfer.csv", folder / "transfer.png")
    pandas.DataFrame(rows).to_csv(files[0], index=False, lineterminator="\r\n")
    draw_matrices(matrices, files[1])
    return TransferResult(folder, tuple(matrices), tuple(notes), files)


def _differing(models: Sequence[TransferModel], cells: Sequence[TransferScore]) -> list[str]:
    """Note scores that differ from the summary: another machine or precision may change a few predictions."""
    notes = []
    for model in models:
        own_score = next(c.absolute for c in cells if c.source == c.target == model.task.name and c.seed == model.seed)
        if abs(own_score - model.reported) > 1e-6:
            notes.append(f"note: {model.name} scores {own_score:.2f} here, its summary says {model.reported:.2f}")
    return notes


def _rows(
    label: str, models: Sequence[TransferModel], scores: Sequence[TransferScore], types: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the rows of `transfer.csv` of one method and tuner: one for every source, target and seed."""
    known = {(model.task.name, model.seed): model for model in models}
    rows = []
    for cell in sorted(scores, key=lambda cell: (cell.source, cell.target, cell.seed)):
        ends = {end: known[getattr(cell, end), cell.seed] for end in ("source", "target")}
        target = ends["target"]
        row: dict[str, Any] = {"source": cell.source, "target": cell.target, "metric": cell.metric}
        row |= {"absolute": _six(cell.absolute), "relative": _six(cell.relative)}
        row |= {"method": target.config.method.name, "tuner": target.config.tuner.name, "setting": label}
        row |= {"seed": cell.seed, "majority": _six(target.majority)}
        row |= {f"{end}_type": types.get(model.task.name, OTHER) for end, model in ends.items()}
        row |= {f"{end}_lr": f"{model.config.train.lr:g}" for end, model in ends.items()}
        alphas = {end: alpha_of(model.config) for end, model in ends.items()}
        rows.append(row | {f"{end}_alpha": "" if alpha is None else f"{alpha:g}" for end, alpha in alphas.items()})
    return rows


def _six(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


@dataclass(frozen=True)
class Matrix:
    """The scores of one method by (source, target), as means over seeds; `relative` to the target's own score.

    Scores are in percent, and pairs without one are absent. Tasks are grouped by type.
    """

    label: str
    tasks: tuple[str, ...]
    types: tuple[str, ...]
    absolute: Mapping[tuple[str, str], float]
    relative: Mapping[tuple[str, str], float]
    seeds: int

    def mean(self, alike: bool | None = None) -> float | None:
        """Return the mean relative score between tasks of the same type, of different types, or (None) of any.

        Pairs with a task of unknown type (`OTHER`) count only among any.
        """
        types = dict(zip(self.tasks, self.types, strict=True))

        def counts(source: str, target: str) -> bool:
            kinds = types[source], types[target]
            return alike is None or (OTHER not in kinds and alike == (kinds[0] == kinds[1]))

        return mean_ignoring_none(value for (s, t), value in self.relative.items() if s != t and counts(s, t))

    def asymmetry(self) -> float | None:
        """Return the mean of |A on B − B on A| over pairs of tasks, in points of relative score."""
        scores = self.relative
        gaps = [abs(value - scores[t, s]) for (s, t), value in scores.items() if s < t and (t, s) in scores]
        return mean_ignoring_none(gaps)

    def texts(self) -> list[list[str]]:
        """Return the matrix as texts: a row for each source, which begins with its name."""
        shares = {pair: f"{value:.0f}" for pair, value in self.relative.items()}
        cells = {pair: f"{value:.1f} ({shares.get(pair, '–')})" for pair, value in self.absolute.items()}
        return [[source, *(cells.get((source, target), "–") for target in self.tasks)] for source in self.tasks]


def matrix(label: str, scores: Sequence[TransferScore], types: Mapping[str, str] = TASK_TYPES) -> Matrix:
    """Make the matrix of one method's scores; tasks are in the order of `types`, unknown tasks last."""
    import pandas

    names = list(dict.fromkeys(one.target for one in scores))
    kinds = {name: types.get(name, OTHER) for name in names}
    order, known = list(dict.fromkeys([*types.values(), OTHER])), list(types)
    tasks = sorted(names, key=lambda name: (order.index(kinds[name]), known.index(name) if name in known else 0))
    frame = pandas.DataFrame(scores).astype({"relative": float})
    frame = frame.groupby(["source", "target"])[["absolute", "relative"]].mean()
    absolute, relative = (frame[name].dropna().to_dict() for name in ("absolute", "relative"))
    seeds = len({one.seed for one in scores})
    return Matrix(label, tuple(tasks), tuple(kinds[name] for name in tasks), absolute, relative, seeds)


def draw_matrices(matrices: Sequence[Matrix], path: Path) -> Path:
    """Draw one row of heatmaps per matrix, relative and absolute scores, into a PNG file.

    Relative scores share one scale centered at 100 (white: as good as the target's own model), absolute scores another.
    Task names have the color of their type.
    """
    from matplotlib.colors import Normalize, TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    side = _CELL * max(len(one.tasks) for one in matrices)
    names = 0.09 * max(len(task) for one in matrices for task in one.tasks)
    size = (2 * (side + names + 1.9), len(matrices) * (side + names + 1.0) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(matrices), 2, squeeze=False)
    reach = max([10.0, *(abs(value - 100) for one in matrices for value in one.relative.values())])
    absolute = [value for one in matrices for value in one.absolute.values()]
    scales = (
        ("relative", "% of the target's own score", "BrBG", TwoSlopeNorm(100, 100 - reach, 100 + reach)),
        ("absolute", "score (%)", "Purples", Normalize(min(absolute), max(max(absolute), min(absolute) + 1))),
    )
    kinds = dict.fromkeys(kind for one in matrices for kind in one.types)
    unnamed = [kind for kind in kinds if kind not in _TYPE_COLORS]
    more = {kind: COLORS[(4 + number) % len(COLORS)] for number, kind in enumerate(unnamed)}
    colors = {kind: (_TYPE_COLORS | more)[kind] for kind in kinds}
    for line, one in zip(panels, matrices, strict=True):
        seeds = f" (mean of {one.seeds} seeds)" if one.seeds > 1 else ""
        for panel, (values, quantity, color_map, norm) in zip(line, scales, strict=True):
            _draw_matrix(panel, one, getattr(one, values), colors, cmap=color_map, norm=norm)
            panel.set_title(f"{one.label}{seeds}: {quantity}", fontsize=9, color=INK, loc="left")
            figure.colorbar(panel.images[0], ax=panel, shrink=0.85).ax.tick_params(labelsize=7)
    handles = [Line2D([], [], marker="s", linestyle="none", color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    return path


def _draw_matrix(
    panel: Axes, one: Matrix, values: Mapping[tuple[str, str], float], colors: Mapping[str, str], **style: Any
) -> None:
    tasks = one.tasks
    table = [[values.get((source, target), float("nan")) for target in tasks] for source in tasks]
    heatmap(panel, table, tasks, tasks, _shown, bold_diagonal=True, **style)
    for axis, rotation in ((panel.xaxis, 45), (panel.yaxis, 0)):
        for tick, kind in zip(axis.get_ticklabels(), one.types, strict=True):
            tick.set(color=colors[kind], fontweight="bold", fontsize=8, rotation=rotation)
    for position in range(1, len(tasks)):  # lines between types
        if one.types[position] != one.types[position - 1]:
            panel.axhline(position - 0.5, color=INK, linewidth=1)
            panel.axvline(position - 0.5, color=INK, linewidth=1)
    panel.set_xlabel("target", fontsize=8)
    panel.set_ylabel("source", fontsize=8)


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


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
        return "".join(
            html_table(f"{one.label}: {MATRIX_TITLE}", ["source ↓ target →", *one.tasks], one.texts())
            for one in self.matrices
        )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"
