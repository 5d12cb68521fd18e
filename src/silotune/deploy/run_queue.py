"""`RunQueue` of a coordinator: a file for each `QueuedRun` with its state, in the order of `start`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from silotune.core.clock import utc_now
from silotune.core.files import write_text
from silotune.core.locking import folder_lock
from silotune.distributed.coordinator.run_registry import FEDERATION_FOLDER
from silotune.errors import InputError

RunState = Literal["queued", "running", "finished", "failed", "stopped"]

LOCK_PATIENCE = 60.0
"""Seconds to wait for another process that changes the queue."""


@dataclass(frozen=True)
class QueuedRun:
    """A run that was started at this coordinator.

    Args:
        number: counts the coordinator's runs from 1.
        out: the run folder.
        method: the method's id.
        rounds: number of rounds.
        silos: the silos' names.
        state: `queued` until the SuperLink has it; `finished`, `failed` and `stopped` are final until it is resumed.
        flower_id: Flower's id of the last submission.
        submissions: how often it was submitted to the SuperLink.
        stop: whether the operator asked to stop it.
        queued: time at which it was started or resumed, UTC in ISO format.
        began: time of its last submission.
        ended: time at which it reached a final state.
        error: the reason why it failed.
    """

    number: int
    out: str
    method: str
    rounds: int
    silos: tuple[str, ...]
    state: RunState = "queued"
    flower_id: str = ""
    submissions: int = 0
    stop: bool = False
    queued: str = ""
    began: str = ""
    ended: str = ""
    error: str = ""

    @property
    def job(self) -> Path:
        """Path of the coordinator's job."""
        return Path(self.out) / FEDERATION_FOLDER / "job.json"

    @property
    def is_over(self) -> bool:
        """Whether its state is final."""
        return self.state in ("finished", "failed", "stopped")


class RunQueue:
    """The runs of one coordinator. Several processes may read and change them.

    Args:
        folder: the coordinator's folder; the runs are in `runs/` there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "runs"

    def runs(self) -> list[QueuedRun]:
        """Return all runs whose files can be read, oldest first; `damaged` names the others."""
        return self._all()[0]

    def damaged(self) -> list[str]:
        """Return a line for each run whose file cannot be read: it neither begins nor goes on."""
        return self._all()[1]

    def _all(self) -> tuple[list[QueuedRun], list[str]]:
        runs, damaged = [], []
        for path in sorted(self._folder.glob("*.json")):
            try:
                runs.append(self._read(path))
            except InputError as error:
                damaged.append(str(error))
        return runs, damaged

    def run(self, number: int) -> QueuedRun:
        """Return a run."""
        path = self._path(number)
        if not path.is_file():
            numbers = [str(run.number) for run in self.runs()]
            raise InputError(f"run {number}: not known here; the runs are: {', '.join(numbers) or 'none'}")
        return self._read(path)

    def add(self, out: Path, method: str, rounds: int, silos: tuple[str, ...]) -> QueuedRun:
        """Append a run; one in the same folder is queued again."""
        with self._locked():
            same = [run for run in self.runs() if run.out == str(out)]
            if same and not same[-1].is_over:
                raise InputError(f"run {same[-1].number}: is {same[-1].state} in {out}")
            number = same[-1].number if same else self._highest() + 1
            return self._write(QueuedRun(number, str(out), method, rounds, silos, queued=utc_now("milliseconds")))

    def change(self, number: int, **fields: Any) -> QueuedRun:
        """Set fields of a run."""
        with self._locked():
            return self._write(replace(self.run(number), **fields))

    def submitted(self, number: int, flower_id: str) -> bool:
        """Record that the SuperLink took a run; False if the run was stopped in the meantime, which changes nothing."""
        with self._locked():
            run = self.run(number)
            if run.is_over:
                return False
            running = replace(run, state="running", flower_id=flower_id, submissions=run.submissions + 1)
            self._write(replace(running, began=utc_now("milliseconds")))
            return True

    def end(self, number: int, state: RunState, error: str = "") -> QueuedRun:
        """Set a run's final state."""
        return self.change(number, state=state, error=error, stop=False, ended=utc_now("milliseconds"))

    def active(self) -> QueuedRun | None:
        """Return the run that is running; there is at most one."""
        return next((run for run in self.runs() if run.state == "running"), None)

    def next(self) -> QueuedRun | None:
        """Return the run that waits longest."""
        waiting = [run for run in self.runs() if run.state == "queued"]
        return min(waiting, key=lambda run: (run.queued, run.number), default=None)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with folder_lock(self._folder, LOCK_PATIENCE):
            yield

    def _highest(self) -> int:
        """Return the highest number that is in use, also by a file that cannot be read; 0 if there is none."""
        names = [path.stem for path in self._folder.glob("*.json")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04d}.json"

    def _write(self, run: QueuedRun) -> QueuedRun:
        write_text(self._path(run.number), json.dumps(asdict(run), indent=1) + "\n")
        return run

    def _read(self, path: Path) -> QueuedRun:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return QueuedRun(**(fields | {"silos": tuple(fields["silos"])}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: damaged ({error}); repair it, or move it away") from error
