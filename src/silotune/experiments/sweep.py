"""`silotune sweep`: per method, the values of some keys that score best on validation rows.

All combinations, or a number of trials that optuna's TPE sampler proposes (Bergstra et al. 2011). A trial is a folder
named after its configuration, so that an interrupted sweep, or one with more values, repeats none. Nothing of the
sampler is stored: seeded and told the same scores, it proposes the same again.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from silotune.config import dump, load_config
from silotune.core.files import write_text
from silotune.errors import InputError, SilotuneError, unknown
from silotune.experiments.best_values import to_words, write_best
from silotune.experiments.comparison import Cell, compared_methods, split_words
from silotune.experiments.runner import Bars, Done, Summary, run_cells
from silotune.experiments.search_space import (
    Choices,
    Dimension,
    Range,
    all_combinations,
    boundary_combinations,
    space_for_method,
    split_search,
)
from silotune.experiments.trial import TRIAL
from silotune.methods import METHODS
from silotune.runs.build.resolve import METHOD_DEFAULTS, read_config

TABLE = "sweep.csv"


@dataclass(frozen=True)
class Sweep:
    """What is searched: method → its keys; `trials`: how many a method, or all combinations where None."""

    source: str
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    spaces: Mapping[str, tuple[Dimension, ...]]
    trials: int | None

    @property
    def keys(self) -> list[str]:
        """All keys searched, in the order given."""
        return list(dict.fromkeys(dimension.key for space in self.spaces.values() for dimension in space))

    def cells(self, method: str, chosen: Mapping[str, Any]) -> list[Cell]:
        """A trial's runs, one a seed."""
        words, tried = [*self.words, f"method={method}"], to_words(chosen)
        configs = [read_config(self.source, [*words, f"seed={seed}"], tried) for seed in self.seeds]
        name = sha256(dump(configs[0].model_copy(update={"seed": 0})).encode()).hexdigest()[:10]
        return [Cell(f"{method}-{name}", config.seed, config) for config in configs]


@dataclass(frozen=True)
class Trial:
    """One choice of values and what it reached: validation scores in percent, one a seed; None if it diverged."""

    method: str
    number: int
    chosen: Mapping[str, Any]
    folder: str
    scores: tuple[float | None, ...]

    @property
    def score(self) -> float | None:
        """The mean over seeds; None if training diverged with any of them."""
        known = [score for score in self.scores if score is not None]
        return statistics.fmean(known) if len(known) == len(self.scores) else None


def read_sweep(source: str, words: Sequence[str], trials: int | None = None) -> Sweep:
    """The sweep that a command asks for.

    Args:
        source: a preset or a YAML file; its `compare` section names methods where the words do not.
        words: `method=a,b` (or methods=), `seeds=1,2`, keys to search (see `split_search`), and any others.
        trials: so many proposals of the sampler for each method; None: every combination.

    Raises:
        InputError: for anything that cannot be searched; nothing has run by then.
    """
    own, rest = split_words([_plural(word) for word in words])
    for word in own:
        key = word.partition("=")[0].removeprefix("compare.")
        if key not in ("methods", "seeds"):
            raise InputError(f"{key}: belongs to compare, not to sweep")
    dimensions, rest = split_search(rest)
    if not dimensions:
        raise InputError("sweep: nothing to search; give a key several values (train.lr=1e-3,5e-4) or a range")
    base = load_config(source, [*own, *rest], METHOD_DEFAULTS)
    methods = compared_methods(base)
    spaces = {method: space_for_method(method, dimensions) for method in methods}
    searched = {(found.key, found.method) for space in spaces.values() for found in space}
    for dimension in dimensions:
        if dimension.method is not None and dimension.method not in methods:
            raise InputError(f"per_method.{dimension.method}: is not swept; methods are {', '.join(methods)}")
        if (dimension.key, dimension.method) not in searched and dimension.key.startswith("method."):
            options = {f"method.{name}" for method in methods for name in METHODS[method].Options.model_fields}
            raise unknown("key", dimension.key, options)
    sweep = Sweep(source, tuple(rest), tuple(base.compare.seeds or [base.seed]), spaces, trials)
    for method, space in spaces.items():
        for chosen in boundary_combinations(space) if trials else all_combinations(space):
            sweep.cells(method, chosen)
    return sweep


def _plural(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"methods={value}" if equals and key.strip() == "method" else word


def run_sweep(
    sweep: Sweep, out: Path, *, workers: int = 1, bars: Bars | None = None, done: Done | None = None
) -> list[Trial]:
    """Run the trials that are not finished yet, and leave `sweep.csv` and `best.yaml`.

    Args:
        sweep: from `read_sweep`.
        out: where the trials' folders and the two files go.
        workers: processes; proposals of a sampler wait for one another, their seeds do not.
        bars: progress of each run (only with one worker).
        done: called after every run.

    Raises:
        SilotuneError: every trial of a method diverged.
        InputError: optuna is missing, or a configuration cannot work with these data.
    """

    def run(cells: Sequence[Cell]) -> dict[str, Summary]:
        return run_cells(cells, out, kind=TRIAL, workers=workers, bars=bars, done=done)

    if sweep.trials is None:
        planned = [(method, chosen) for method, space in sweep.spaces.items() for chosen in all_combinations(space)]
        cells = [sweep.cells(method, chosen) for method, chosen in planned]
        found = run([cell for several in cells for cell in several])
        numbers = [n for space in sweep.spaces.values() for n in range(1, len(all_combinations(space)) + 1)]
        trials = [
            _judged(method, number, chosen, several, found)
            for (method, chosen), number, several in zip(planned, numbers, cells, strict=True)
        ]
    else:
        trials = [trial for method in sweep.spaces for trial in _proposed(sweep, method, sweep.trials, run)]
    best = {method: best_trial(trials, method) for method in sweep.spaces}
    write_text(out / TABLE, table_csv(sweep, trials))
    write_best(out, {method: trial.chosen for method, trial in best.items()}, _remark(sweep, best))
    return trials


def _judged(
    method: str, number: int, chosen: Mapping[str, Any], cells: Sequence[Cell], found: Mapping[str, Summary]
) -> Trial:
    scores = tuple(found[cell.folder]["validation"] for cell in cells)
    return Trial(method, number, chosen, cells[0].row, scores)


def _proposed(
    sweep: Sweep, method: str, trials: int, run: Callable[[Sequence[Cell]], dict[str, Summary]]
) -> Iterator[Trial]:
    """So many proposals of optuna's sampler, each told before the next is asked for."""
    optuna = _optuna()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=sweep.seeds[0]))
    space = sweep.spaces[method]
    for number in range(1, (trials if space else 1) + 1):
        asked = study.ask()
        chosen = {dimension.key: _suggested(asked, dimension) for dimension in space}
        cells = sweep.cells(method, chosen)
        trial = _judged(method, number, chosen, cells, run(cells))
        if trial.score is None:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(asked, trial.score)
        yield trial


def _suggested(asked: Any, dimension: Dimension) -> Any:
    match dimension:
        case Choices(key, values):
            return values[asked.suggest_categorical(key, list(range(len(values))))]
        case Range(key, low, high, log) if dimension.is_integer:
            return asked.suggest_int(key, low, high, log=log)
        case Range(key, low, high, log):
            return dimension.rounded(asked.suggest_float(key, low, high, log=log))


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise InputError("--trials: needs the package optuna; pip install 'silotune[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def best_trial(trials: Sequence[Trial], method: str) -> Trial:
    """The method's trial with the highest mean validation score; the first of equals.

    Raises:
        SilotuneError: all of them diverged.
    """
    known = [trial for trial in trials if trial.method == method and trial.score is not None]
    if not known:
        raise SilotuneError(f"sweep: every trial of method {method!r} diverged; search smaller learning rates")
    return max(known, key=lambda trial: trial.score if trial.score is not None else 0.0)


def table_csv(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """`sweep.csv`: a row for every trial. Scores in percent, of validation rows; empty where training diverged."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "trial", *sweep.keys, "validation", "std", "n", "best", "folder"])
    for trial in trials:
        score = trial.score
        several = [value for value in trial.scores if value is not None]
        std = statistics.stdev(several) if score is not None and len(several) > 1 else None
        numbers = ["" if value is None else f"{value:.6f}" for value in (score, std)]
        values = [trial.chosen.get(key, "") for key in sweep.keys]
        best = "yes" if trial is best_trial(trials, trial.method) else ""
        writer.writerow([trial.method, trial.number, *values, *numbers, len(trial.scores), best, trial.folder])
    return text.getvalue()


def _remark(sweep: Sweep, best: Mapping[str, Trial]) -> str:
    lines = [
        f"The best values of each method by validation score, from a sweep over {', '.join(sweep.keys)}.",
        f"Setting: {' '.join([Path(sweep.source).name, *sweep.words])}; seeds {', '.join(map(str, sweep.seeds))}.",
        "For compare: best=FOLDER (this folder), or copied into a configuration.",
    ]
    return "\n".join([*lines, *(f"{method}: {trial.score:.2f} %" for method, trial in best.items())])
