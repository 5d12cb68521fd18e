"""Search the values of keys for each method on validation rows alone, from Python or the command line.

A sweep tries all combinations, or a number of trials proposed by optuna's TPE sampler (Bergstra et al. 2011). A trial's
folder is named after its configuration, so an interrupted or extended sweep repeats no trial. The sampler's state needs
no storage: with the same seed and scores it proposes the same values again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from silotune.config import Config, dump
from silotune.config.keys import Keys
from silotune.core.determinism import numerics
from silotune.core.files import dump_yaml, make_folder, write_text
from silotune.core.notebook import html_table
from silotune.core.numeric import mean_ignoring_none
from silotune.core.workers import Workers, end_unguarded_worker
from silotune.data.loading import load_absent, load_silos
from silotune.data.rows import Row
from silotune.data.tasks import lower_is_better
from silotune.errors import OR_RESUME, Diverged, InputError, SilotuneError, require_unused
from silotune.lab import runner
from silotune.lab.comparison import BEST_FILE, TABLE, Cell, words_of
from silotune.lab.report.tables import ResultTable, TableCell
from silotune.lab.search_space import Sweep, read_sweep
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import make_method
from silotune.runs.build.start import keep_start
from silotune.runs.build.validation import check_labels
from silotune.runs.callbacks import Callback
from silotune.runs.callbacks.base import EventFeed
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.storage.run_folder import working_in

if TYPE_CHECKING:
    import pandas

TRIAL_FILE = "trial.json"

_DIGITS = 4  # significant digits of a number drawn from a range


def sweep(
    source: str | Config,
    *overrides: str,
    search: Mapping[str, Sequence[object] | str] = {},
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    out: str | Path,
    trials: int | None = None,
    resume: bool = False,
    workers: int | Workers = 1,
    progress: bool | runner.Listener | None = None,
    elsewhere: runner.Elsewhere | None = None,
    **keys: Unpack[Keys],
) -> SweepResult:
    """Search learning rates and other keys for each method, on validation rows alone.

    Args:
        source: preset name, path of a YAML file, or a `Config`. For methods other than its own, the keys of a `Config`
            act as preset values: the method's default tuner and aggregation come first.
        overrides: `key=value` words, also of searched keys.
        search: searched key → its values, or a range as text (`"1e-4..1e-2:log"`).
        methods: ids of the methods; if empty, those of the source.
        seeds: seeds of every trial; if empty, those of the source.
        out: the folder of the trials; must be new or empty unless `resume`.
        trials: trials per method, proposed by optuna's TPE; None: all combinations.
        resume: continue an interrupted sweep; finished trials are not repeated.
        workers: processes, or `Workers` on a Ray cluster. All combinations run in parallel; with a sampler only the
            seeds of one trial do, because a proposal depends on the scores before it.
        progress: whether to show progress, as for `run`, or what is called while the trials run; with a sampler, which
            proposes them one by one, it does not learn their number.
        elsewhere: has all combinations run, as over a federation, where silos score test rows, too (values are chosen
            by validation rows all the same); None: they are run here.
        keys: keys of every run; a group of keys is a dictionary.
    """
    end_unguarded_worker()
    folder, spread = Path(out), Workers.of(workers)
    if not resume:
        require_unused(folder, "--out", OR_RESUME)
    if elsewhere is not None and trials is not None:
        raise InputError(
            "--trials: nobody knows a sampler's trials beforehand, so no silo can approve them; over a federation give "
            "each key its values (train.lr=1e-3,5e-4)"
        )
    words = [*overrides, *words_of(methods, seeds), *map(_search_word, search.items())]
    plan = read_sweep(source, words, trials, **keys)
    cells = [cell for *_, of_trial in plan.planned for cell in of_trial]
    if elsewhere is None:
        runner.check_cells(cells, folder, spread)
        make_folder(folder, f"--out {folder}")
    follow = runner.listener_of(progress)
    if plan.trials is not None:
        follow = replace(follow, begin=lambda _: None)
    run = partial(runner.run_cells, out=folder, kind=TRIAL, workers=spread, listener=follow)

    failure = None
    if plan.trials is not None:
        results = [trial for method in plan.spaces for trial in _sampled_trials(plan, method, plan.trials, run)]
    else:
        if elsewhere is None:
            summaries = run(cells)
        else:
            summaries, failure = _run_elsewhere(cells, folder, elsewhere, follow)
        results = [_trial_of(*trial, summaries) for trial in plan.planned]
    write_text(folder / TABLE, _table(plan, results).to_csv(index=False, lineterminator="\n"))
    if failure is not None:
        raise SilotuneError(f"{failure}; {folder / TABLE} has the finished ones") from failure
    best = {method: best_trial(results, method) for method in plan.spaces}
    tree = {"per_method": {method: dict(trial.chosen) for method, trial in best.items()}}
    write_text(folder / BEST_FILE, _describe_sweep(plan, best) + dump_yaml(tree))
    return SweepResult(folder, plan, results)


def _trial(
    config: Config,
    path: Path,
    callbacks: Sequence[Callback],
    backbone: Backbone | None,
    _announce: runner.Announce | None,
) -> tuple[runner.Summary, Backbone]:
    """Run a trial: return its validation score at the best round (None where training diverged), and the backbone.

    Without test rows, no test score can influence the choice of values. Trained parts are discarded: the chosen values
    are trained again later.
    """
    none: list[Row] = []  # one object: silos that share validation rows must share their test rows, too
    data = [replace(silo, splits=replace(silo.splits, test=none)) for silo in load_silos(config)]
    tasks = [silo.task for silo in [*data, *load_absent(config)]]
    make_method(config).setting.head.check_names(tasks)
    check_labels(config, tasks)
    if not any(silo.splits.validation for silo in data):
        raise InputError("sweep: no silo has validation rows, so there is nothing to choose by")
    federation = build(config, backbone, data)
    with (
        EventFeed(path, config.rounds, callbacks) as feed,
        working_in(path, dump(federation.config), federation.backbone, resume=True) as folder,
    ):
        keep_start(path, federation.context)
        engine = InProcessEngine(federation, folder, feed)
        summary: runner.Summary = {"validation": None, "best_round": None}
        try:
            with numerics(config.precision.deterministic, config.precision.tf32):
                engine.run()
        except Diverged as error:
            summary["reason"] = str(error)
        else:
            summary |= {"validation": engine.history.best_validation, "best_round": engine.history.best_round}
            summary |= {"lower_is_better": True} if federation.lower_is_better else {}
        folder.checkpoints.forget()
        write_text(path / TRIAL_FILE, json.dumps(summary | {"seconds": engine.history.seconds}, indent=1) + "\n")
    return summary, federation.backbone


TRIAL = runner.CellKind(_trial, TRIAL_FILE)


def _run_elsewhere(
    cells: Sequence[Cell], out: Path, elsewhere: runner.Elsewhere, listener: runner.Listener
) -> tuple[dict[str, runner.Summary], SilotuneError | None]:
    """Run trials as whole runs on other machines; return validation scores, and the error of those that failed."""
    summaries, failure = runner.run_elsewhere(cells, out, elsewhere, lambda: None)
    trials: dict[str, runner.Summary] = {}
    for cell in cells:
        if cell.folder not in summaries:
            trials[cell.folder] = {"validation": None}
            continue
        silos = summaries[cell.folder]["silos"].values()
        score = mean_ignoring_none(silo["validation"] for silo in silos)
        if score is None:
            raise InputError(f"{cell.folder}: no silo shares validation scores, so there is nothing to choose by")
        lower = cell.config.validates_by_loss or any(lower_is_better(silo["metric"]) for silo in silos)
        trials[cell.folder] = {"validation": score} | ({"lower_is_better": True} if lower else {})
        listener.done(cell, trials[cell.folder])
    return trials, failure


def _search_word(searched: tuple[str, Sequence[object] | str]) -> str:
    key, values = searched
    if isinstance(values, str):
        return f"{key}={values}"
    if len(values) < 2 or any(isinstance(value, str) and "," in value for value in values):
        raise InputError(f"{key}: a search needs several values, without commas (got {values!r})")
    words = (value if isinstance(value, str) else json.dumps(value, default=str) for value in values)
    return f"{key}={','.join(words)}"


@dataclass(frozen=True)
class TrialResult:
    """One choice of values and its validation scores (percent, or losses) per seed; None where training diverged."""

    method: str
    number: int
    chosen: Mapping[str, Any]
    folder: str
    scores: tuple[float | None, ...]
    lower_is_better: bool = False

    @property
    def score(self) -> float | None:
        """Mean over seeds; None if training diverged with any of them."""
        return statistics.fmean(self._known) if self._known else None

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds; None with one seed, or if training diverged."""
        return statistics.stdev(self._known) if len(self._known) > 1 else None

    @property
    def _known(self) -> list[float]:
        return [] if None in self.scores else [score for score in self.scores if score is not None]

    @property
    def goodness(self) -> float:
        """The mean score, with its sign changed if lower is better; minus infinity if training diverged."""
        if self.score is None:
            return float("-inf")
        return -self.score if self.lower_is_better else self.score


def _trial_of(
    method: str, number: int, values: Mapping[str, Any], cells: Sequence[Cell], summaries: Mapping[str, runner.Summary]
) -> TrialResult:
    scores = tuple(summaries[cell.folder]["validation"] for cell in cells)
    lower = any(summaries[cell.folder].get("lower_is_better", False) for cell in cells)
    return TrialResult(method, number, values, cells[0].entry, scores, lower)


def _sampled_trials(
    sweep: Sweep, method: str, trials: int, run: Callable[[Sequence[Cell]], dict[str, runner.Summary]]
) -> Iterator[TrialResult]:
    """Yield trials proposed by optuna's sampler; each score is reported before the next proposal."""
    import optuna

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=sweep.seeds[0]))
    space = sweep.spaces[method]
    for number in range(1, (trials if space else 1) + 1):
        proposal = study.ask(dict(space))
        values = {key: _rounded(value, space[key]) for key, value in proposal.params.items()}
        cells = sweep.cells(method, values)
        trial = _trial_of(method, number, values, cells, run(cells))
        if trial.score is None:
            study.tell(proposal, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(proposal, trial.goodness)
        yield trial


def _rounded(value: Any, drawn_from: Any) -> Any:
    """Round a decimal number drawn from a range to a few digits, so that it can be written down."""
    if not isinstance(value, float) or hasattr(drawn_from, "choices"):
        return value
    return min(max(float(f"{value:.{_DIGITS}g}"), drawn_from.low), drawn_from.high)


def best_trial(trials: Sequence[TrialResult], method: str) -> TrialResult:
    """Return the method's trial with the highest mean validation score, or the lowest loss; the first of equals."""
    scored = [trial for trial in trials if trial.method == method and trial.score is not None]
    if not scored:
        raise SilotuneError(f"sweep: every trial of method {method!r} diverged; search smaller learning rates")
    return max(scored, key=lambda trial: trial.goodness)


def _table(sweep: Sweep, trials: Sequence[TrialResult]) -> pandas.DataFrame:
    """Return the rows of `sweep.csv`: one per trial, validation scores in percent, empty without one."""
    import pandas

    rows = []
    for trial in trials:
        numbers = ["" if value is None else f"{value:.6f}" for value in (trial.score, trial.std)]
        values = [str(trial.chosen.get(key, "")) for key in sweep.keys]
        best = "yes" if trial.score is not None and trial is best_trial(trials, trial.method) else ""
        rows.append([trial.method, trial.number, *values, *numbers, len(trial.scores), best, trial.folder])
    return pandas.DataFrame(rows, columns=["method", "trial", *sweep.keys, "validation", "std", "n", "best", "folder"])


def _describe_sweep(sweep: Sweep, best: Mapping[str, TrialResult]) -> str:
    """Return the comment at the top of `best.yaml`."""
    source = Path(sweep.source).name if isinstance(sweep.source, str) else "a Config"
    lines = [
        f"The best values of each method by validation score, from a sweep over {', '.join(sweep.keys)}.",
        f"Setting: {' '.join([source, *sweep.words])}; seeds {', '.join(map(str, sweep.seeds))}.",
        "For compare: best=FOLDER (this folder), or copied into a configuration.",
        *(f"{method}: {trial.score:.2f}{'' if trial.lower_is_better else ' %'}" for method, trial in best.items()),
    ]
    return "".join(f"# {line}\n" for part in lines for line in part.splitlines())


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A finished sweep, in a folder with `sweep.csv` and `best.yaml`, of which `compare` takes `best=FOLDER`."""

    folder: Path
    plan: Sweep
    trials: Sequence[TrialResult]

    @property
    def best(self) -> dict[str, TrialResult]:
        """Method → its best trial."""
        return {method: best_trial(self.trials, method) for method in self.plan.spaces}

    @property
    def files(self) -> tuple[Path, Path]:
        """The table of trials and the best values."""
        return self.folder / TABLE, self.folder / BEST_FILE

    def to_pandas(self) -> pandas.DataFrame:
        """Return `sweep.csv`: a row for every trial."""
        import pandas

        return pandas.read_csv(self.files[0])

    def __repr__(self) -> str:
        lines = [
            f"{method}: {', '.join(f'{key}={value}' for key, value in trial.chosen.items())} "
            f"(validation {trial.score:.2f})"
            for method, trial in self.best.items()
        ]
        return "\n".join([f"SweepResult({str(self.folder)!r}): {len(self.trials)} trials, best values", *lines])

    def table(self) -> ResultTable:
        """Make the table of trials, for display; each method's best score is marked."""
        rows = []
        for trial in self.trials:
            score = "diverged" if trial.score is None else f"{trial.score:.2f}"
            score += "" if trial.std is None else f" ± {trial.std:.2f}"
            values = [str(trial.number), *(str(trial.chosen.get(key, "")) for key in self.plan.keys)]
            best = TableCell(score, rank=int(trial is self.best[trial.method]))
            rows.append((trial.method, [*map(TableCell, values), best]))
        header = ["trial", *self.plan.keys, "validation"]
        return ResultTable("validation score at each trial's best round", header, rows)

    def _repr_html_(self) -> str:
        table = _table(self.plan, self.trials).astype(str)
        return html_table("validation score at each trial's best round", list(table), table.to_numpy().tolist())
