"""`run_sweep`: a `TrialResult` for each of all combinations or optuna's proposals; `sweep.csv`, best values.

It tries all combinations, or a number of trials proposed by optuna's TPE sampler (Bergstra et al. 2011). A trial's
folder is named after its configuration, so an interrupted or extended sweep repeats no trial. The sampler's state is
not stored: with the same seed and scores it proposes the same values again.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack, cast

from silotune.config import Config, dump, load_config
from silotune.config.keys import Keys
from silotune.core.files import write_text
from silotune.core.workers import Workers, end_unguarded_worker
from silotune.errors import InputError, SilotuneError, unknown_name_error
from silotune.lab.best_values import to_words, write_best
from silotune.lab.comparison import Cell, compared_methods, refuse_one_of_several, split_words
from silotune.lab.runner import CallbackFactory, OnCellDone, OnCellsBegin, Summary, run_cells
from silotune.lab.search_space import (
    Choices,
    Dimension,
    Range,
    all_combinations,
    boundary_combinations,
    space_for_method,
    split_search,
)
from silotune.lab.trial import TRIAL
from silotune.methods import METHODS
from silotune.runs.build.resolve import METHOD_DEFAULTS, keys_of, read_config

TABLE = "sweep.csv"


@dataclass(frozen=True)
class Sweep:
    """A planned sweep.

    Args:
        source: the preset, YAML file or `Config`.
        words: `key=value` words of every run.
        seeds: seeds of every trial.
        spaces: method to its search space.
        trials: proposals per method; None for all combinations.
        given: keys of every run, as values of Python.
    """

    source: str | Config
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    spaces: Mapping[str, tuple[Dimension, ...]]
    trials: int | None
    given: Keys = field(default_factory=lambda: Keys())

    @property
    def keys(self) -> list[str]:
        """All searched keys, in the given order."""
        return list(dict.fromkeys(dimension.key for space in self.spaces.values() for dimension in space))

    def cells(self, method: str, chosen: Mapping[str, Any]) -> list[Cell]:
        """Return a trial's runs, one per seed.

        Their folders are named after a hash of the configuration. The hash leaves out the seed (by setting it to 0), so
        that all runs of a trial share it.
        """
        run_words, trial_words = [*self.words, f"method={method}"], to_words(chosen)
        configs = [
            read_config(self.source, [*run_words, f"seed={seed}"], trial_words, **self.given) for seed in self.seeds
        ]
        name = sha256(dump(configs[0].model_copy(update={"seed": 0})).encode()).hexdigest()[:10]
        return [Cell(f"{method}-{name}", config.seed, config) for config in configs]


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
    def goodness(self) -> float:
        """The mean score, with its sign changed if lower is better; of a trial that has one."""
        score = self.score if self.score is not None else 0.0
        return -score if self.lower_is_better else score

    @property
    def score(self) -> float | None:
        """Mean over seeds; None if training diverged with any of them."""
        scores = [score for score in self.scores if score is not None]
        return statistics.fmean(scores) if len(scores) == len(self.scores) else None


def read_sweep(source: str | Config, words: Sequence[str], trials: int | None = None, **keys: Unpack[Keys]) -> Sweep:
    """Plan the sweep that a command asks for.

    Args:
        source: a preset, a YAML file or a `Config`; its section `compare` lists methods if the words do not.
        words: `method=a,b` (or `methods=`), `seeds=1,2`, keys to search (see `split_search`) and any others.
        trials: proposals of the sampler per method; None for all combinations.
        keys: keys of every run, as values of Python.
    """
    sweep_words, run_words = split_words([_methods_word(word) for word in words])
    for word in sweep_words:
        key = word.partition("=")[0].removeprefix("compare.")
        if key not in ("methods", "seeds"):
            raise InputError(f"{key}: belongs to compare, not to sweep")
    dimensions, run_words = split_search(run_words)
    if not dimensions:
        raise InputError("sweep: nothing to search; give a key several values (train.lr=1e-3,5e-4) or a range")
    refuse_one_of_several(keys)
    given = cast("dict[str, object]", keys)
    base = load_config(keys_of(source), [*sweep_words, *run_words], METHOD_DEFAULTS, keys=given)
    methods = compared_methods(base)
    spaces = {method: space_for_method(method, dimensions) for method in methods}
    searched = {(dimension.key, dimension.method) for space in spaces.values() for dimension in space}
    for dimension in dimensions:
        if dimension.method is not None and dimension.method not in methods:
            raise InputError(f"per_method.{dimension.method}: is not swept; methods are {', '.join(methods)}")
        if (dimension.key, dimension.method) not in searched and dimension.key.startswith("method."):
            options = {f"method.{name}" for method in methods for name in METHODS[method].Options.model_fields}
            raise unknown_name_error("key", dimension.key, options)
    sweep = Sweep(source, tuple(run_words), tuple(base.compare.seeds or [base.seed]), spaces, trials, keys)
    # make the configurations once before anything runs: they check their values
    for method, space in spaces.items():
        for chosen in boundary_combinations(space) if trials else all_combinations(space):
            sweep.cells(method, chosen)
    return sweep


def _methods_word(word: str) -> str:
    """Return `method=a,b` as `methods=a,b`, and other words unchanged."""
    key, equals, value = word.partition("=")
    return f"methods={value}" if equals and key.strip() == "method" else word


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    workers: int | Workers = 1,
    callbacks: CallbackFactory | None = None,
    begin: OnCellsBegin | None = None,
    done: OnCellDone | None = None,
) -> list[TrialResult]:
    """Run the unfinished trials, then write `sweep.csv` and `best.yaml`.

    Args:
        sweep: the plan, see `read_sweep`.
        out: folder for the trials and the two files.
        workers: number of processes, or `Workers` on a Ray cluster. All combinations run in parallel; with a sampler
            only the seeds of one trial do, because a proposal depends on the scores before it.
        callbacks: makes what follows a run; used with one worker only.
        begin: called with the number of unfinished runs; not with a sampler, which proposes them one by one.
        done: called after every run.

    Returns:
        All trials.

    Raises:
        SilotuneError: every trial of a method diverged.
    """
    end_unguarded_worker()

    def run(cells: Sequence[Cell]) -> dict[str, Summary]:
        announced = begin if sweep.trials is None else None
        return run_cells(cells, out, kind=TRIAL, workers=workers, callbacks=callbacks, begin=announced, done=done)

    if sweep.trials is None:
        planned = [(method, chosen) for method, space in sweep.spaces.items() for chosen in all_combinations(space)]
        cells = [sweep.cells(method, chosen) for method, chosen in planned]
        summaries = run([cell for trial_cells in cells for cell in trial_cells])
        numbers = [n for space in sweep.spaces.values() for n in range(1, len(all_combinations(space)) + 1)]
        trials = [
            _trial_of(method, number, chosen, trial_cells, summaries)
            for (method, chosen), number, trial_cells in zip(planned, numbers, cells, strict=True)
        ]
    else:
        trials = [trial for method in sweep.spaces for trial in _sampled_trials(sweep, method, sweep.trials, run)]
    best = {method: best_trial(trials, method) for method in sweep.spaces}
    write_text(out / TABLE, table_csv(sweep, trials))
    write_best(out, {method: trial.chosen for method, trial in best.items()}, _describe_sweep(sweep, best))
    return trials


def _trial_of(
    method: str, number: int, chosen: Mapping[str, Any], cells: Sequence[Cell], summaries: Mapping[str, Summary]
) -> TrialResult:
    scores = tuple(summaries[cell.folder]["validation"] for cell in cells)
    lower = any(summaries[cell.folder].get("lower_is_better", False) for cell in cells)
    return TrialResult(method, number, chosen, cells[0].entry, scores, lower)


def _sampled_trials(
    sweep: Sweep, method: str, trials: int, run: Callable[[Sequence[Cell]], dict[str, Summary]]
) -> Iterator[TrialResult]:
    """Yield trials proposed by optuna's sampler; each score is reported before the next proposal."""
    optuna = _optuna()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=sweep.seeds[0]))
    space = sweep.spaces[method]
    for number in range(1, (trials if space else 1) + 1):
        proposal = study.ask()
        chosen = {dimension.key: _suggested(proposal, dimension) for dimension in space}
        cells = sweep.cells(method, chosen)
        trial = _trial_of(method, number, chosen, cells, run(cells))
        if trial.score is None:
            study.tell(proposal, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(proposal, trial.goodness)
        yield trial


def _suggested(proposal: Any, dimension: Dimension) -> Any:
    match dimension:
        case Choices(key, values):
            # by index, because categories of optuna must be plain values
            return values[proposal.suggest_categorical(key, list(range(len(values))))]
        case Range(key, low, high, log) if dimension.is_integer:
            return proposal.suggest_int(key, low, high, log=log)
        case Range(key, low, high, log):
            return dimension.rounded(proposal.suggest_float(key, low, high, log=log))


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise InputError("--trials: needs the package optuna; pip install 'silotune[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def best_trial(trials: Sequence[TrialResult], method: str) -> TrialResult:
    """Return the method's trial with the highest mean validation score, or the lowest loss; the first of equals.

    Raises:
        SilotuneError: all its trials diverged.
    """
    scored = [trial for trial in trials if trial.method == method and trial.score is not None]
    if not scored:
        raise SilotuneError(f"sweep: every trial of method {method!r} diverged; search smaller learning rates")
    return max(scored, key=lambda trial: trial.goodness)


def table_csv(sweep: Sweep, trials: Sequence[TrialResult]) -> str:
    """Return `sweep.csv`: one row per trial, validation scores in percent, empty where training diverged."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "trial", *sweep.keys, "validation", "std", "n", "best", "folder"])
    for trial in trials:
        score = trial.score
        scores = [value for value in trial.scores if value is not None]
        std = statistics.stdev(scores) if score is not None and len(scores) > 1 else None
        numbers = ["" if value is None else f"{value:.6f}" for value in (score, std)]
        values = [trial.chosen.get(key, "") for key in sweep.keys]
        best = "yes" if trial is best_trial(trials, trial.method) else ""
        writer.writerow([trial.method, trial.number, *values, *numbers, len(trial.scores), best, trial.folder])
    return text.getvalue()


def _describe_sweep(sweep: Sweep, best: Mapping[str, TrialResult]) -> str:
    lines = [
        f"The best values of each method by validation score, from a sweep over {', '.join(sweep.keys)}.",
        f"Setting: {' '.join([_described(sweep.source), *sweep.words])}; seeds {', '.join(map(str, sweep.seeds))}.",
        "For compare: best=FOLDER (this folder), or copied into a configuration.",
    ]
    return "\n".join(
        [
            *lines,
            *(f"{method}: {trial.score:.2f}{'' if trial.lower_is_better else ' %'}" for method, trial in best.items()),
        ]
    )


def _described(source: str | Config) -> str:
    return Path(source).name if isinstance(source, str) else "a Config"
