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
from typing import Any

from typing_extensions import override

from silotune.config.trees import flat
from silotune.core.files import read_json, write_text
from silotune.errors import needs, require_known
from silotune.runs.callbacks.base import Callback, RoundEnd


class Tracker(Callback, ABC):
    """Writes the scalars of every round, each once: rounds that it wrote before a resume are left out.

    A tracker whose runs lie elsewhere names a `note`: a file of the run folder with its run's id and last round.
    """

    note = ""
    _id: str | None = None

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any], run: str) -> str:
        """Begin a run, or continue the one with this id if it is not empty; return its id."""

    @abstractmethod
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        """Write one round."""

    @abstractmethod
    def finish(self) -> None:
        """Close what was opened."""

    @override
    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._note = folder / self.note
        last: dict[str, Any] = read_json(self._note) if self.note and self._note.is_file() else {"id": "", "round": 0}
        self._written = int(last["round"])
        self._id = self.open(folder, config, str(last["id"]))

    @override
    def on_round(self, ended: RoundEnd) -> None:
        if ended.round > self._written:
            self.log(ended, ended.scalars())
            self._written = ended.round
            if self.note:
                write_text(self._note, json.dumps({"id": self._id, "round": self._written}) + "\n")

    @override
    def close(self) -> None:
        if self._id is not None:
            self.finish()


class CsvLog(Tracker):
    """Writes `rounds.csv` into the run folder: a line for each number of each round, rewritten after a resume."""

    @override
    def open(self, folder: Path, config: Mapping[str, Any], run: str) -> str:
        self._file = (folder / "rounds.csv").open("w", newline="", encoding="utf-8")
        self._lines = csv.writer(self._file)
        self._lines.writerow(["round", "seconds", "name", "value"])
        return run

    @override
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        self._lines.writerows([ended.round, ended.seconds, name, value] for name, value in scalars.items())
        self._file.flush()

    @override
    def finish(self) -> None:
        self._file.close()


class TensorBoard(Tracker):
    """Writes event files into the run folder's `tensorboard/`, and rewrites them after a resume.

    The time axis counts the run's own seconds from the creation of its folder.
    """

    def __init__(self) -> None:
        self._make = _installed("torch.utils.tensorboard", "tensorboard").SummaryWriter

    @override
    def open(self, folder: Path, config: Mapping[str, Any], run: str) -> str:
        for path in (folder / "tensorboard").glob("events.out.tfevents.*"):
            path.unlink(missing_ok=True)
        self._writer = self._make(str(folder / "tensorboard"))
        self._begin = (folder / "versions.json").stat().st_mtime
        return run

    @override
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, ended.round, walltime=self._begin + ended.seconds)
        self._writer.flush()

    @override
    def finish(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """Logs to Weights & Biases: scalars with the round as step, the configuration, and the summary's averages.

    Args:
        arguments: of `wandb.init`: `project`, `name`, `mode="offline"` and others. Files lie in the run folder.
    """

    note = "wandb.json"

    def __init__(self, **arguments: Any) -> None:
        self._wandb = _installed("wandb", "wandb")
        self._arguments = {"project": "silotune"} | arguments

    @override
    def open(self, folder: Path, config: Mapping[str, Any], run: str) -> str:
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
    def finish(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """Logs to MLflow: scalars with the round as step, the configuration as parameters, and the summary's averages.

    Args:
        experiment: the experiment's name.
        tracking_uri: where runs are kept; if None, as MLflow is configured.
    """

    note = "mlflow.json"
    _status = "KILLED"  # interrupted, or failed: `on_end` was not called

    def __init__(self, experiment: str = "silotune", tracking_uri: str | None = None) -> None:
        self._client = _installed("mlflow.tracking", "mlflow").MlflowClient(tracking_uri)
        self._experiment = experiment

    @override
    def open(self, folder: Path, config: Mapping[str, Any], run: str) -> str:
        if run:
            self._client.update_run(run, status="RUNNING")
            return run
        record = self._client.get_experiment_by_name(self._experiment)
        experiment = record.experiment_id if record else self._client.create_experiment(self._experiment)
        run = str(self._client.create_run(experiment, run_name=folder.name).info.run_id)
        for key, value in flat(config):
            self._client.log_param(run, key, str(value)[:500])
        return run

    @override
    def log(self, ended: RoundEnd, scalars: Mapping[str, float]) -> None:
        self._log(scalars, step=ended.round)

    def _log(self, scalars: Mapping[str, float], **step: int) -> None:
        for name, value in scalars.items():  # MLflow allows no parentheses
            self._client.log_metric(self._id, name.replace("(", "").replace(")", ""), value, **step)

    @override
    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._log(summary_scalars(summary))
        self._status = "FINISHED"

    @override
    def finish(self) -> None:
        self._client.set_terminated(self._id, self._status)


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
