"""`TensorBoard` (`run --tensorboard`): writes a run's events as scalars by round."""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from silotune.errors import InputError
from silotune.experiments.report.series import logged_values
from silotune.runs.engines.base import Progress
from silotune.runs.storage.readers import events

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


FOLDER = "tensorboard"

_BYTES = ("bytes_up", "bytes_down")


class TensorBoard:
    """Writes scalars by round: `validation/SILO` (percent) and their mean, `loss/SILO` and loss terms, bytes.

    Use it as a context around a run, and as its progress: each call writes the rounds that have ended since. Files of
    an earlier, interrupted part of the run are rewritten from the log, so no round occurs twice. The time axis counts
    the run's own seconds from the creation of its folder.

    Args:
        run: the run folder; files go into its `tensorboard/`.
        progress: also called.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, run: Path, progress: Progress | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "--tensorboard: needs the package tensorboard; pip install 'silotune[tensorboard]'"
            ) from error
        self._make = SummaryWriter
        self._run = run
        self._progress = progress
        self._writer: SummaryWriter | None = None
        self._written = 0  # last round that was written
        self._seen = 0  # last round that progress reported

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self._writer is not None:  # a refused run's folder may belong to another run
            self._write()
        if self._writer is not None:
            self._writer.close()

    def __call__(self, number: int, what: str, done: int, total: int) -> None:
        """See `Progress`."""
        if self._progress is not None:
            self._progress(number, what, done, total)
        if number > self._seen:
            self._seen = number
            self._write()

    def _write(self) -> None:
        if not (self._run / "versions.json").exists():
            return  # the run folder does not exist yet, and must be empty when it is made
        if self._writer is None:
            folder = self._run / FOLDER
            for path in folder.glob("events.out.tfevents.*"):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            self._writer = self._make(str(folder))
        waiting: list[dict[str, Any]] = []
        for event in events(self._run):
            if event.get("round", 0) <= self._written:
                continue
            waiting.append(event)
            if event.get("event") == "round":  # deployed federations log it after the next round's training
                self._round(
                    event,
                    [other_event for other_event in waiting if other_event.get("round") == event["round"]],
                    self._writer,
                )
                waiting = [other_event for other_event in waiting if other_event.get("round", 0) > event["round"]]
        self._writer.flush()

    def _round(self, ended: dict[str, Any], logged: list[dict[str, Any]], writer: SummaryWriter) -> None:
        number = int(ended["round"])
        time = (self._run / "versions.json").stat().st_mtime + float(ended["seconds"])
        scalars: dict[str, float] = {}
        scores = {silo: float(score) for silo, score in (ended.get("validation") or {}).items() if score is not None}
        scalars |= {f"validation/{silo}": score for silo, score in scores.items()}
        if len(scores) > 1:
            scalars["validation/mean over silos"] = statistics.fmean(scores.values())
        for event in logged:
            kind, party = event.get("event"), event.get("silo", "coordinator")
            if kind in ("silo", "server", "final"):
                suffix = " (final phases)" if kind == "final" else ""
                scalars |= {f"{term}{suffix}/{party}": value for term, value in logged_values(event).items()}
                scalars |= {f"{key}/{party}": float(event[key]) for key in _BYTES if key in event}
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, number, walltime=time)
        self._written = number
