"""Callbacks follow a run round by round; `EventFeed` reads the event log as it grows and calls them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from silotune.core.files import load_yaml
from silotune.core.numeric import mean_ignoring_none
from silotune.methods.step import EVENT_KEYS
from silotune.runs.engines.base import Progress
from silotune.runs.storage.readers import EVENTS

_BYTES = ("bytes_up", "bytes_down")


@dataclass(frozen=True)
class RoundEnd:
    """A round that has ended.

    Args:
        round: its number, from 1.
        rounds: how many rounds the run has.
        validation: silo → score on validation rows (percent, or a loss), None without rows; empty if the round was not
            judged.
        seconds: of the run so far, in this process and in those before it.
        events: the round's other events: `silo`, `server`, `final`, `refused` and so on, as in `events.jsonl`.
        replayed: the round ended before this process started, and is repeated to callbacks after a resume.
    """

    round: int
    rounds: int
    validation: Mapping[str, float | None]
    seconds: float
    events: tuple[Mapping[str, Any], ...]
    replayed: bool

    @property
    def mean(self) -> float | None:
        """The mean validation score over silos; None if none was judged."""
        return mean_ignoring_none(self.validation.values())

    @property
    def product_error(self) -> float | None:
        """The error of averaging LoRA's A and B (docs/federated-lora.md); None in rounds without it."""
        errors = [event["product_error"] for event in self.events if "product_error" in event]
        return float(errors[-1]) if errors else None

    def scalars(self) -> dict[str, float]:
        """Return the round's numbers: `validation/SILO`, their mean, `loss/SILO`, loss terms and bytes by silo.

        Also `product_error/coordinator`, where there is one.
        """
        scalars = {f"validation/{silo}": float(score) for silo, score in self.validation.items() if score is not None}
        if len(scalars) > 1 and self.mean is not None:
            scalars["validation/mean over silos"] = self.mean
        for event in self.events:
            kind, party = event.get("event"), event.get("silo", "coordinator")
            if kind in ("silo", "server", "final"):
                suffix = " (final phases)" if kind == "final" else ""
                scalars |= {f"{term}{suffix}/{party}": value for term, value in logged_values(event).items()}
                scalars |= {f"{key}/{party}": float(event[key]) for key in _BYTES if key in event}
        if self.product_error is not None:
            scalars["product_error/coordinator"] = self.product_error
        return scalars


class Callback:
    """Follows a run; override what you need. An exception ends the run, which can be resumed.

    Calls come in this order: `on_start`; for each round `on_progress` and `on_silo` any number of times, then
    `on_round`; `on_end` if the run is finished; `close` in any case. After a resume, silos and rounds that ended before
    are repeated first. `on_round` is called when the next piece of work begins.
    """

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Called before the first call of any other kind.

        Args:
            folder: the run folder.
            config: the run's `config.yaml`, by section.
        """

    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        """Called before every piece of work, `what`, when `done` of the round's `total` silos are finished."""

    def on_silo(self, round: int, silo: str, values: Mapping[str, Any]) -> None:
        """Called when a silo's local round has ended.

        Args:
            round: the round's number.
            silo: the silo's name.
            values: loss and its terms, seconds, rows and bytes, as far as the silo discloses them.
        """

    def on_round(self, ended: RoundEnd) -> None:
        """Called when a round has ended."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called when the run is finished, with the content of `summary.json`."""

    def close(self) -> None:
        """Called once at last, also after an error or an interruption; after it, no call follows."""


def logged_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss, its terms and similarities in one event: all numbers but those under the engine's own keys."""
    return {
        key: float(value)
        for key, value in event.items()
        if key not in EVENT_KEYS - {"loss"} and isinstance(value, (int, float))
    }


def silo_values(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an event of kind `silo` says of the silo's round."""
    return {key: value for key, value in event.items() if key not in ("event", "round", "silo", "time")}


class EventFeed:
    """Follows one run. Use it as a context around the run, and as the engine's progress.

    A call of progress first tells what was logged since, once a second at most within a round. Only the log's new lines
    are read, and without callbacks none. The folder may not exist yet; `progress` is called before the callbacks.
    """

    def __init__(
        self, folder: Path, rounds: int, callbacks: Sequence[Callback], progress: Progress | None = None
    ) -> None:
        self._folder = folder
        self._rounds = rounds
        self._callbacks = callbacks
        self._progress = progress
        self._started = False
        self._last = (-1, 0.0)  # round and time of the last progress that made it read the log
        self._inode = 0  # of the log: a resume writes it anew
        self._position = 0  # bytes of the log that were read
        self._waiting: dict[int, list[dict[str, Any]]] = {}  # events of rounds that have not ended
        self._ended = 0  # the last round that was told
        self._silos: set[tuple[int, str]] = set()  # of rounds that have not ended, which were told

    def __enter__(self) -> EventFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._started or kind is None:  # a refused run's folder may belong to another run
                self.poll()
        finally:
            for callback in self._callbacks:
                callback.close()

    def __call__(self, number: int, what: str, done: int, total: int) -> None:
        """See `engines.base.Progress`."""
        if self._progress is not None:
            self._progress(number, what, done, total)
        now = time.monotonic()
        if number != self._last[0] or now - self._last[1] >= 1:
            self._last = (number, now)
            self.poll()
        for callback in self._callbacks:
            callback.on_progress(number, what, done, total)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell the rest, and that the run is finished."""
        self.poll()
        for callback in self._callbacks:
            callback.on_end(summary)

    def poll(self) -> None:
        """Call the callbacks with all that was logged since the last call."""
        if not self._callbacks:
            return
        replayed = not self._started
        if not self._started:
            if not (self._folder / "versions.json").is_file():
                return  # the folder is not made yet, and must be empty when it is
            self._started = True
            config = load_yaml((self._folder / "config.yaml").read_text(encoding="utf-8"))
            for callback in self._callbacks:
                callback.on_start(self._folder, config)
        for event in self._new_events():
            number = int(event.get("round", 0))
            if number <= self._ended:
                continue
            if event["event"] == "round":  # deployed federations log it after the next round's training
                self._end_round(event, replayed)
                continue
            self._waiting.setdefault(number, []).append(event)
            if event["event"] == "silo" and (number, event["silo"]) not in self._silos:
                self._silos.add((number, event["silo"]))
                for callback in self._callbacks:
                    callback.on_silo(number, event["silo"], silo_values(event))

    def _end_round(self, event: Mapping[str, Any], replayed: bool) -> None:
        number = self._ended = int(event["round"])
        of_round = tuple(self._waiting.pop(number, []))
        self._silos = {entry for entry in self._silos if entry[0] > number}
        scores = event.get("validation") or {}
        ended = RoundEnd(number, self._rounds, scores, float(event["seconds"]), of_round, replayed)
        for callback in self._callbacks:
            callback.on_round(ended)

    def _new_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of complete lines that were not read yet; all of them if the log was rewritten."""
        path = self._folder / EVENTS
        if not path.is_file():
            return
        with path.open("rb") as file:
            status = path.stat()
            if status.st_ino != self._inode or status.st_size < self._position:
                self._inode, self._position, self._waiting = status.st_ino, 0, {}
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield json.loads(line)


def read_rounds(folder: Path, rounds: int) -> list[RoundEnd]:
    """Return the rounds of a run's folder that have ended, of so many in all."""
    ends: list[RoundEnd] = []

    class Collected(Callback):
        def on_round(self, ended: RoundEnd) -> None:
            ends.append(ended)

    with EventFeed(folder, rounds, [Collected()]):
        pass  # all is told at the end
    return ends
