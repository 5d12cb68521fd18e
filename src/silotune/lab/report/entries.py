"""Read finished runs for a report, and group them into entries: one method, or a variant of it, over several seeds."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from silotune.config.trees import flat
from silotune.core.files import damage_named, load_yaml
from silotune.errors import InputError
from silotune.runs.storage.readers import events, read_summary
from silotune.runs.storage.scored_rows import PREDICTIONS_FILE

COMPARISON_FILE = "comparison.json"
"""File that `silotune compare` writes beside its run folders: rows, seeds and ddof."""

_IGNORED_KEYS = ("seed", "description", "threads", "compare")
"""Keys in which the runs of one entry may differ."""


_TRAINING_KEYS = ("train_rows", "validation_rows")
"""Keys of `data` that affect neither the test rows nor their scores."""


@dataclass(frozen=True)
class FinishedRun:
    """Contents of a run folder."""

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
    def shares_test_rows(self) -> bool:
        """Whether one data set was partitioned, so that all silos are tested on the same rows."""
        return self.summary.get("global") is not None

    @cached_property
    def setting(self) -> str:
        """The configuration without the keys in which repetitions differ, as JSON."""
        compared = {key: value for key, value in self.config.items() if key not in _IGNORED_KEYS}
        return json.dumps(compared, sort_keys=True, default=str)

    @cached_property
    def evaluated_on(self) -> str:
        """Text that identifies the test data and metrics; runs with equal texts and seeds have comparable scores.

        The configuration of a deployed federation does not name its data, so tasks, metrics and row counts are part of
        the text; where silos are judged on their own kinds of rows, so is the partition.
        """
        divided = self.config.get("partition") or {}
        kinds = divided if divided.get("evaluation") == "own" else None
        data = {key: value for key, value in (self.config.get("data") or {}).items() if key not in _TRAINING_KEYS}
        return json.dumps([data, kinds, self.config.get("silos"), self._test_sets()], sort_keys=True, default=str)

    def _test_sets(self) -> object:
        """Return task, metric and number of test rows per silo, without names if silos share their test rows."""
        tasks = self.summary.get("tasks") or {}
        test_sets = {
            name: (tasks.get(name, {}).get("name"), silo.get("metric"), (silo.get("rows") or {}).get("test"))
            for name, silo in self.summary["silos"].items()
        }
        if not self.shares_test_rows:
            return test_sets
        return sorted({(str(task), str(metric), rows) for task, metric, rows in test_sets.values() if rows is not None})

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.events if event.get("event") == kind]

    @cached_property
    def predictions(self) -> dict[str, dict[str, list[Any]]]:
        """The columns of `predictions.parquet` for each silo; for "" where one model has one set of test rows."""
        import pandas

        path = self.folder / PREDICTIONS_FILE
        frame = pandas.read_parquet(path) if path.is_file() else None
        if frame is None or not len(frame):
            raise InputError(f"no rows kept ({PREDICTIONS_FILE} of {self.folder.name})")
        groups = frame.assign(silo=frame["silo"].fillna("")).groupby("silo", sort=True)
        return {str(silo): {str(key): list(rows[key]) for key in rows} for silo, rows in groups}

    @property
    def message_bytes(self) -> float:
        """The mean size of the updates that left silos; 0 if none did."""
        sizes = [event["bytes_up"] for event in self.events_of("silo") if event.get("bytes_up")]
        return statistics.fmean(sizes) if sizes else 0.0

    @property
    def rows_are_fixed(self) -> bool:
        """Whether `data.seed` chooses the run's rows, and not the run's own seed."""
        return (self.config.get("data") or {}).get("seed") is not None


@dataclass(frozen=True)
class ReportEntry:
    """An entry of the report, a row of its tables: a method (or a variant of one) over several seeds."""

    label: str
    runs: tuple[FinishedRun, ...]

    def __repr__(self) -> str:
        return f"ReportEntry({self.label!r}, seeds {', '.join(str(run.seed) for run in self.runs)})"

    def mean_of(self, key: str) -> float:
        """Average a number of the summaries, ignoring missing values; NaN if all are missing."""
        values = [float(run.summary[key]) for run in self.runs if run.summary[key] is not None]
        return sum(values) / len(values) if values else math.nan

    @property
    def first(self) -> FinishedRun:
        """The first run, for values that do not depend on the seed."""
        return self.runs[0]


def read_run(folder: Path) -> FinishedRun:
    """Read a finished run."""
    summary = read_summary(folder)
    for key in ("method", "seed", "silos", "average", "bytes_up", "bytes_down", "seconds", "best_round"):
        if key not in summary:
            raise InputError(f"{folder}/summary.json: damaged (no {key!r})")
    with damage_named(folder / "config.yaml"):
        config = dict(load_yaml((folder / "config.yaml").read_text(encoding="utf-8")))
    return FinishedRun(folder, summary, config)


def read_entries(folders: Sequence[Path]) -> list[ReportEntry]:
    """Read the entries of a report from run folders and folders of comparisons (all finished runs in them).

    Entries of comparisons keep their names; runs with the same name and configuration form one entry across folders.
    """
    labeled_runs = [item for folder in folders for item in _find_runs(folder)]
    named: dict[tuple[str, str], list[FinishedRun]] = {}
    unnamed: list[FinishedRun] = []
    paths: set[Path] = set()
    labeled_runs.sort(key=lambda item: item[0] is None)  # runs of comparisons first: a run given twice keeps its name
    for label, path in labeled_runs:
        if path.resolve() in paths:
            continue
        paths.add(path.resolve())
        run = read_run(path)
        if label is None:
            unnamed.append(run)
        else:
            named.setdefault((label, run.setting), []).append(run)
    entries: list[ReportEntry] = []
    for entry in [*_comparison_entries(named), *group_runs(unnamed)]:
        entries.append(ReportEntry(_unique_label(entry.label, [other.label for other in entries]), entry.runs))
    return entries


def _comparison_entries(named: Mapping[tuple[str, str], Sequence[FinishedRun]]) -> list[ReportEntry]:
    """Make the entries of comparisons; a name with several configurations is prefixed by the comparison's folder."""
    ambiguous = {label for label, number in Counter(label for label, _ in named).items() if number > 1}
    entries = []
    for (label, _), runs in named.items():
        folder = os.path.basename(os.path.abspath(runs[0].folder.parent))
        entries.append(ReportEntry(f"{folder}: {label}" if label in ambiguous else label, tuple(runs)))
    return entries


def _find_runs(folder: Path) -> list[tuple[str | None, Path]]:
    """List (label in the comparison or None, run folder) below a folder, or for a run folder itself."""
    itself: list[tuple[str | None, Path]] = [(None, folder)]
    if (folder / "summary.json").exists() or not folder.is_dir():
        return itself
    run_folders = sorted(path.parent for path in folder.glob("*/summary.json"))
    if not run_folders:
        if (folder / "config.yaml").exists():
            raise InputError(f"{folder}: that run is not finished; `silotune watch {folder}` shows it")
        return itself
    try:
        plan = json.loads((folder / COMPARISON_FILE).read_text(encoding="utf-8"))
        labels, seeds = list(plan["rows"]), list(plan["seeds"])
    except (OSError, ValueError, KeyError, TypeError):
        return [(None, path) for path in run_folders]
    planned = {f"{label}-{seed}": label for label in labels for seed in seeds}
    comparison_runs = [(label, folder / name) for name, label in planned.items() if folder / name in run_folders]
    return [*comparison_runs, *((None, path) for path in run_folders if path.name not in planned)]


def group_runs(runs: Sequence[FinishedRun]) -> list[ReportEntry]:
    """Group runs by configuration; entries of one method are labeled with the keys in which they differ."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    values = {key: {name: value for name, value in flat(json.loads(key)) if value != {}} for key in groups}
    labels: list[str] = []
    for key, group in groups.items():
        method = str(group[0].summary["method"])
        same_method = [values[other] for other, peers in groups.items() if str(peers[0].summary["method"]) == method]
        names = sorted({name for config in same_method for name in config})
        differing = [name for name in names if len({str(config.get(name)) for config in same_method}) > 1]
        differing.sort(key=lambda name: not name.startswith("method."))  # a method's own options say most
        options = [(name.removeprefix("method."), values[key].get(name)) for name in differing[:3]]
        description = ", ".join(f"{name}={_brief(value)}" for name, value in options if value is not None)
        labels.append(_unique_label(f"{method} ({description})" if description else method, labels))
    pairs = zip(labels, groups.values(), strict=True)
    return [ReportEntry(label, tuple(sorted(group, key=lambda run: run.seed))) for label, group in pairs]


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"…{text[-19:]}"


def _unique_label(label: str, labels: Sequence[str]) -> str:
    number, candidate = 2, label
    while candidate in labels:
        candidate, number = f"{label} #{number}", number + 1
    return candidate


def silo_names(entries: Sequence[ReportEntry]) -> list[str]:
    """Return all silos of all entries, in order of appearance."""
    return list(dict.fromkeys(name for entry in entries for run in entry.runs for name in run.summary["silos"]))
