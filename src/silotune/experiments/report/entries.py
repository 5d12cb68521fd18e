"""Finished run folders, read and put together: runs that differ in nothing but the seed are one row."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from silotune.errors import InputError
from silotune.experiments.comparison import FILE
from silotune.runs.storage.readers import events, read_summary

_OF_A_REPETITION = ("seed", "description", "threads", "compare")
"""Keys in which runs of one row may differ; `compare` says what else was to be run."""


_ANY_TEST_ROWS = ("train_rows", "validation_rows")
"""Keys of `data` that leave the test rows and how they are scored as they are."""


@dataclass(frozen=True)
class FinishedRun:
    """A run folder's contents."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The event log."""
        return list(events(self.folder))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.summary["seed"])

    @property
    def central(self) -> bool:
        """Whether one data set was partitioned, so that all silos are judged on the same rows."""
        return self.summary.get("global") is not None

    @cached_property
    def setting(self) -> str:
        """The configuration, without what repetitions differ in."""
        compared = {key: value for key, value in self.config.items() if key not in _OF_A_REPETITION}
        return json.dumps(compared, sort_keys=True, default=str)

    @cached_property
    def evaluated_on(self) -> str:
        """What decides, beside the seed, which rows a silo of that name is tested on and by which score.

        The configuration of a deployed federation does not name its data: tasks, metrics and how many rows there are
        tell it apart.
        """
        data = {key: value for key, value in (self.config.get("data") or {}).items() if key not in _ANY_TEST_ROWS}
        return json.dumps([data, self.config.get("silos"), self._tested()], sort_keys=True, default=str)

    def _tested(self) -> object:
        """Silo → task, metric and number of test rows; without silos where all are judged on the same rows."""
        tasks = self.summary.get("tasks") or {}
        found = {
            name: (tasks.get(name, {}).get("name"), silo.get("metric"), (silo.get("rows") or {}).get("test"))
            for name, silo in self.summary["silos"].items()
        }
        if not self.central:
            return found
        return sorted({(str(task), str(metric), rows) for task, metric, rows in found.values() if rows is not None})

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events if event.get("event") == kind]


@dataclass(frozen=True)
class ReportEntry:
    """A row of the table: a method (or a variant of one) over several seeds."""

    label: str
    runs: tuple[FinishedRun, ...]

    def mean_of(self, key: str) -> float:
        """The mean of a number of the summaries, of those that have it; NaN where none does."""
        found = [float(run.summary[key]) for run in self.runs if run.summary[key] is not None]
        return sum(found) / len(found) if found else math.nan

    @property
    def first(self) -> FinishedRun:
        """The first run; what does not depend on the seed is read from it."""
        return self.runs[0]

    @property
    def evaluated_on(self) -> str:
        """See `FinishedRun`; rows whose scores may be set against one another have the same."""
        return self.first.evaluated_on


def read_run(folder: Path) -> FinishedRun:
    """A finished run.

    Raises:
        InputError: if there is none, or it is damaged.
    """
    summary = read_summary(folder)
    for key in ("method", "seed", "silos", "average", "bytes_up", "bytes_down", "seconds", "best_round"):
        if key not in summary:
            raise InputError(f"{folder}/summary.json: damaged (no {key!r})")
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{folder}/config.yaml: missing or damaged") from error
    if not isinstance(config, dict):
        raise InputError(f"{folder}/config.yaml: damaged (no mapping of keys)")
    return FinishedRun(folder, summary, config)


def read_entries(folders: Sequence[Path]) -> list[ReportEntry]:
    """The rows of a table, from run folders and folders of comparisons (all finished runs in them).

    Comparisons name their rows; those of one name and one configuration are one row, whichever folders they lie in.

    Raises:
        InputError: for a folder without a finished run.
    """
    rows = [found for folder in folders for found in _rows_of(folder)]
    labelled: dict[tuple[str, str], list[FinishedRun]] = {}
    free: list[FinishedRun] = []
    seen: set[Path] = set()
    for row, path in sorted(rows, key=lambda found: found[0] is None):  # a comparison's run is its, however it is given
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        run = read_run(path)
        if row is None:
            free.append(run)
        else:
            labelled.setdefault((row, run.setting), []).append(run)
    entries: list[ReportEntry] = []
    for entry in [*_planned(labelled), *group_runs(free)]:
        entries.append(ReportEntry(_distinct(entry.label, [other.label for other in entries]), entry.runs))
    return entries


def _planned(labelled: Mapping[tuple[str, str], Sequence[FinishedRun]]) -> list[ReportEntry]:
    """The rows of comparisons; where one name stands for several, the comparison's folder tells them apart."""
    several = {row for row, number in Counter(row for row, _ in labelled).items() if number > 1}
    entries = []
    for (row, _), runs in labelled.items():
        folder = os.path.basename(os.path.abspath(runs[0].folder.parent))
        entries.append(ReportEntry(f"{folder}: {row}" if row in several else row, tuple(runs)))
    return entries


def _rows_of(folder: Path) -> list[tuple[str | None, Path]]:
    """(row, run folder) of a comparison; without rows of a folder of runs, or of a run itself."""
    itself: list[tuple[str | None, Path]] = [(None, folder)]
    if (folder / "summary.json").exists() or not folder.is_dir():
        return itself
    below = sorted(path.parent for path in folder.glob("*/summary.json"))
    if not below:
        if (folder / "config.yaml").exists():
            raise InputError(f"{folder}: that run is not finished; `silotune watch {folder}` shows it")
        return itself
    try:
        plan = json.loads((folder / FILE).read_text(encoding="utf-8"))
        rows, seeds = list(plan["rows"]), list(plan["seeds"])
    except (OSError, ValueError, KeyError, TypeError):
        return [(None, path) for path in below]
    planned = {f"{row}-{seed}": row for row in rows for seed in seeds}
    inside = [(row, folder / name) for name, row in planned.items() if folder / name in below]
    return [*inside, *((None, path) for path in below if path.name not in planned)]


def group_runs(runs: Sequence[FinishedRun]) -> list[ReportEntry]:
    """Runs by configuration; rows of one method are told apart by the keys in which they differ."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    flat = {key: flatten_keys(json.loads(key)) for key in groups}
    labels: list[str] = []
    for key, group in groups.items():
        method = str(group[0].summary["method"])
        alike = [flat[other] for other, runs_ in groups.items() if str(runs_[0].summary["method"]) == method]
        names = sorted({name for config in alike for name in config})
        differing = [name for name in names if len({str(config.get(name)) for config in alike}) > 1]
        differing.sort(key=lambda name: not name.startswith("method."))  # a method's own options say most
        given = [(name.removeprefix("method."), flat[key].get(name)) for name in differing]
        what = ", ".join(f"{name}={_brief(value)}" for name, value in given[:3] if value is not None)
        labels.append(_distinct(f"{method} ({what})" if what else method, labels))
    pairs = zip(labels, groups.values(), strict=True)
    return [ReportEntry(label, tuple(sorted(group, key=lambda run: run.seed))) for label, group in pairs]


def _brief(value: object) -> str:
    """The end of a long value, which tells paths apart."""
    text = str(value)
    return text if len(text) <= 20 else f"…{text[-19:]}"


def _distinct(label: str, taken: Sequence[str]) -> str:
    number, found = 2, label
    while found in taken:
        found, number = f"{label} #{number}", number + 1
    return found


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def group_by_data(entries: Sequence[ReportEntry]) -> list[list[ReportEntry]]:
    """Rows that are judged on the same data, together."""
    groups: dict[str, list[ReportEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.evaluated_on, []).append(entry)
    return list(groups.values())


def centrally_evaluated(entries: Sequence[ReportEntry]) -> bool:
    """Whether every run judges all silos on the same rows."""
    return all(run.central for entry in entries for run in entry.runs)


def distinguishable_silos(entries: Sequence[ReportEntry]) -> list[str]:
    """The silos whose scores are worth a column: none where each run has one model, judged on the same rows."""
    alike = (len({silo.get("test") for silo in run.summary["silos"].values()}) <= 1 for e in entries for run in e.runs)
    return [] if centrally_evaluated(entries) and all(alike) else silo_names(entries)


def silo_names(entries: Sequence[ReportEntry]) -> list[str]:
    """All silos of all rows, in the order in which they come."""
    return list(dict.fromkeys(name for entry in entries for run in entry.runs for name in run.summary["silos"]))
