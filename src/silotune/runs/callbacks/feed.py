"""Read a run's event log as it grows and call its callbacks, under any engine and after a resume."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from silotune.core.yaml_text import load_yaml
from silotune.runs.callbacks.base import Callback, RoundEnd
from silotune.runs.engines.base import Progress
from silotune.runs.storage.readers import EVENTS


class EventFeed:
    """Follows one run. Use it as a context around the run, and as the engine's progress.

    A call of progress first tells what was logged since, once a second at most within a round. Only the log's new lines
    are read.

    Args:
        folder: the run folder, which may not exist yet.
        rounds: how many rounds the run has.
        callbacks: who is told, in this order; without callbacks the log is not read.
        progress: is called with progress alone, before the callbacks.
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
                self._tell()
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
            self._tell()
        for callback in self._callbacks:
            callback.on_progress(number, what, done, total)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell the rest, and that the run is finished."""
        self._tell()
        for callback in self._callbacks:
            callback.on_end(summary)

    def _tell(self) -> None:
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
                values = {key: value for key, value in event.items() if key not in ("event", "round", "silo", "time")}
                for callback in self._callbacks:
                    callback.on_silo(number, event["silo"], values)

    def _end_round(self, event: Mapping[str, Any], replayed: bool) -> None:
        number = self._ended = int(event["round"])
        of_round = tuple(self._waiting.pop(number, []))
        self._silos = {told for told in self._silos if told[0] > number}
        scores = event.get("validation") or {}
        ended = RoundEnd(number, self._rounds, scores, float(event["seconds"]), of_round, replayed)
        for callback in self._callbacks:
            callback.on_round(ended)

    def _new_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of complete lines that were not read yet; all of them if the log was written anew."""
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
    """Return the rounds that have ended, from a run's event log.

    Args:
        folder: the run folder.
        rounds: how many rounds the run has.
    """
    ends: list[RoundEnd] = []

    class Collected(Callback):
        def on_round(self, ended: RoundEnd) -> None:
            ends.append(ended)

    with EventFeed(folder, rounds, [Collected()]):
        pass  # all is told at the end
    return ends
