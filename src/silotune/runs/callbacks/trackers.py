"""Send a run's numbers round by round to a CSV file, TensorBoard, Weights & Biases or MLflow.

What they write is what the coordinator's event log says: scores, losses and bytes by silo; never a row or a text.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from silotune.config.trees import flat
from silotune.core.files import read_json, write_text
from silotune.errors import needs, require_known
from silotune.runs.callbacks.base import Callback, RoundEnd


class Tracker(Callback, ABC):
    """Writes the scalars of every round, each once: rounds that it wrote before a resume are left out."""

    _folder: Path

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any]) -> int:
        """Begin, or continue after a resume; return the last round that is written already."""

    @abstractmethod
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        """Write one round."""

    @override
    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._written = self.open(folder, config)

    @override
    def on_round(self, ended: RoundEnd) -> None:
        if ended.round > self._written:
            self.log(ended, ended.scalars())
            self._written = ended.round


class CsvLog(Tracker):
    """Writes `rounds.csv` into the run folder: a line for each number of each round, rewritten after a resume."""

    _file: IO[str] | None = None

    @override
    def open(self, folder: Path, config: Mapping[str, Any]) -> int:
        self._file = (folder / "rounds.csv").open("w", newline="", encoding="utf-8")
        csv.writer(self._file).writerow(["round", "seconds", "name", "value"])
        return 0

    @override
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        assert self._file is not None, "opened by on_start"
        csv.writer(self._file).writerows([ended.round, ended.seconds, name, scalars[name]] for name in scalars)
        self._file.flush()

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard(Tracker):
    """Writes event files into the run folder's `tensorboard/`, and rewrites them after a resume.

    The time axis counts the run's own seconds from the creation of its folder.
    """

    _writer: Any = None

    def __init__(self) -> None:
        self._make = _installed("torch.utils.tensorboard", "tensorboard").SummaryWriter

    @override
    def open(self, folder: Path, config: Mapping[str, Any]) -> int:
        for path in (folder / "tensorboard").glob("events.out.tfevents.*"):
            path.unlink(missing_ok=True)
        self._writer = self._make(str(folder / "tensorboard"))
        return 0

    @override
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        time = (self._folder / "versions.json").stat().st_mtime + ended.seconds
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, ended.round, walltime=time)
        self._writer.flush()

    @override
    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Remote(Tracker):
    """A tracker with its own run ids; id and last round are noted in a file of the run folder."""

    _note: str
    _id: str = ""

    @override
    def open(self, folder: Path, config: Mapping[str, Any]) -> int:
        path = folder / self._note
        note: dict[str, Any] = read_json(path) if path.is_file() else {"id": "", "round": 0}
        self._id = self.begin(str(note["id"]), folder, config)
        return int(note["round"])

    @abstractmethod
    def begin(self, run: str, folder: Path, config: Mapping[str, Any]) -> str:
        """Continue the run with this id, or begin one if the id is empty; return its id."""

    @override
    def on_round(self, ended: RoundEnd) -> None:
        super().on_round(ended)
        write_text(self._folder / self._note, json.dumps({"id": self._id, "round": self._written}) + "\n")


class WandB(_Remote):
    """Logs to Weights & Biases: scalars with the round as step, the configuration, and the summary's averages.

    Args:
        arguments: of `wandb.init`: `project`, `name`, `mode="offline"` and others. Files lie in the run folder.
    """

    _note = "wandb.json"
    _run: Any = None

    def __init__(self, **arguments: Any) -> None:
        self._wandb = _installed("wandb", "wandb")
        self._arguments = {"project": "silotune"} | arguments

    @override
    def begin(self, run: str, folder: Path, config: Mapping[str, Any]) -> str:
        named = {"name": folder.name, "dir": str(folder), "config": dict(config)} | self._arguments
        self._run = self._wandb.init(**named, **({"id": run, "resume": "allow"} if run else {}))
        return str(self._run.id)

    @override
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=ended.round)

    @override
    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(summary_scalars(summary))

    @override
    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflow(_Remote):
    """Logs to MLflow: scalars with the round as step, the configuration as parameters, and the summary's averages.

    Args:
        experiment: the experiment's name.
        tracking_uri: where runs are kept; if None, as MLflow is configured.
    """

    _note = "mlflow.json"

    def __init__(self, experiment: str = "silotune", tracking_uri: str | None = None) -> None:
        self._client = _installed("mlflow.tracking", "mlflow").MlflowClient(tracking_uri)
        self._experiment = experiment

    @override
    def begin(self, run: str, folder: Path, config: Mapping[str, Any]) -> str:
        if run:
            self._client.update_run(run, status="RUNNING")
            return run
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        begun = str(self._client.create_run(experiment, run_name=folder.name).info.run_id)
        for key, value in flat(config):
            self._client.log_param(begun, key, str(value)[:500])
        return begun

    @override
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._id, _allowed(name), value, step=ended.round)

    @override
    def on_end(self, summary: Mapping[str, Any]) -> None:
        for name, value in summary_scalars(summary).items():
            self._client.log_metric(self._id, _allowed(name), value)
        self._client.set_terminated(self._id, "FINISHED")
        self._id = ""

    @override
    def close(self) -> None:
        if self._id:  # interrupted, or failed: `on_end` was not called
            self._client.set_terminated(self._id, "KILLED")


TRACKERS: dict[str, type[Tracker]] = {"csv": CsvLog, "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""Trackers by the name that the command line gives them."""


def make_tracker(name: str) -> Tracker:
    """Return a tracker with its defaults."""
    require_known("tracker", name, TRACKERS)
    return TRACKERS[name]()


def summary_scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return a summary's numbers: `summary/average`, best round, bytes and seconds, and `test/SILO` (percent)."""
    keys = ("average", "best_round", "bytes_up", "bytes_down", "seconds")
    scalars = {f"summary/{key}": float(summary[key]) for key in keys if isinstance(summary.get(key), (int, float))}
    silos = summary.get("silos", {})
    return scalars | {f"test/{name}": entry["test"] for name, entry in silos.items() if entry.get("test") is not None}


def _installed(module: str, extra: str) -> Any:
    with needs(f"{extra}: is not installed", extra):
        return import_module(module)


def _allowed(name: str) -> str:
    """Return a metric's name with MLflow's characters alone: it allows no parentheses."""
    return name.replace("(", "").replace(")", "")
