"""`sweep` runs a whole sweep, for Python and `silotune sweep`; `SweepResult`: its trials and their best values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from silotune.config import Config
from silotune.config.keys import Keys
from silotune.core.files import make_folder
from silotune.core.notebook import html_table
from silotune.core.workers import Workers, end_unguarded_worker
from silotune.errors import OR_RESUME, InputError, require_unused
from silotune.lab.best_values import BEST_FILE
from silotune.lab.runner import CallbackFactory, OnCellDone, OnCellsBegin
from silotune.lab.sweep import TABLE, Sweep, TrialResult, best_trial, read_sweep, run_sweep
from silotune.runs.callbacks.display import default_display

if TYPE_CHECKING:
    import pandas


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
    progress: bool | None = None,
    callbacks: CallbackFactory | None = None,
    begin: OnCellsBegin | None = None,
    done: OnCellDone | None = None,
    **keys: Unpack[Keys],
) -> SweepResult:
    """Search learning rates and other keys for each method, on validation rows alone.

    Args:
        source: preset name, path of a YAML file, or a `Config`, whose keys are to its own method what a file's are, and
            to others what a preset's are: a method's own tuner or aggregation comes before them.
        overrides: `key=value` words, also of searched keys.
        search: searched key → its values, or a range as text (`"1e-4..1e-2:log"`).
        methods: ids of the methods; if empty, those of the source.
        seeds: seeds of every trial; if empty, those of the source.
        out: the folder of the trials; must be new or empty unless `resume`.
        trials: trials per method, proposed by optuna's TPE; None: all combinations.
        resume: go on; no finished trial is repeated.
        workers: processes that trials are spread over, or `Workers` on a Ray cluster.
        progress: as of `run`.
        callbacks: makes what follows a trial, from (title, rounds), instead of `progress`; with one worker only.
        begin: called with the number of trials' runs that are not there yet; not where a sampler proposes trials.
        done: called after every trial that was not there yet, with its cell and summary.
        keys: keys of every run; a group of keys is a dictionary.

    Raises:
        SilotuneError: every trial of a method diverged.
    """
    end_unguarded_worker()
    folder = Path(out)
    if not resume:
        require_unused(folder, "--out", OR_RESUME)
    words = [f"methods={','.join(methods)}"] if methods else []
    words += [f"seeds={','.join(map(str, seeds))}"] if seeds else []
    planned = read_sweep(source, [*overrides, *words, *map(_search_word, search.items())], trials, **keys)
    make_folder(folder, f"--out {folder}")
    follow = callbacks or partial(default_display, progress)
    finished = run_sweep(planned, folder, workers=workers, callbacks=follow, begin=begin, done=done)
    return SweepResult(folder, planned, finished)


def _search_word(searched: tuple[str, Sequence[object] | str]) -> str:
    """Return a searched key as a word of the command line."""
    key, values = searched
    if isinstance(values, str):
        return f"{key}={values}"
    if len(values) < 2 or any(isinstance(value, str) and "," in value for value in values):
        raise InputError(f"{key}: a search needs several values, without commas (got {values!r})")
    words = (value if isinstance(value, str) else json.dumps(value, default=str) for value in values)
    return f"{key}={','.join(words)}"


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A finished sweep.

    Attributes:
        folder: the folder of its trials, `sweep.csv` and `best.yaml`, of which `compare` takes `best=FOLDER`.
        plan: what was searched.
        trials: all trials.
    """

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
            f"(validation {_score(trial.score)})"
            for method, trial in self.best.items()
        ]
        return "\n".join([f"SweepResult({str(self.folder)!r}): {len(self.trials)} trials, best values", *lines])

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: a row for every trial."""
        best: list[Any] = list(self.best.values())
        rows = [
            [
                trial.method,
                str(trial.number),
                *(str(trial.chosen.get(key, "")) for key in self.plan.keys),
                f"{_score(trial.score)}{' (best)' if trial in best else ''}",
            ]
            for trial in self.trials
        ]
        header = ["method", "trial", *self.plan.keys, "validation"]
        return html_table("validation score at each trial's best round", header, rows)


def _score(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.2f}"
