"""`WorkQueue`: which piece of work each worker is given: one that waits, or a copy of one that takes long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

_OVERDUE, _AT_LEAST = 2.0, 1.0
"""A piece is overdue after this many times the longest of the last pieces, and this many seconds."""

_LAST = 1024
"""How many finished pieces an overdue one is compared with: several rounds of a small federation."""

_MOST_COPIES = 3
"""Workers that may have the same piece: a whole machine that stalls may hold more than one of them."""


@dataclass(eq=False)
class Piece:
    """A piece of work.

    Args:
        call: the function, its arguments and its keyword arguments.
        result: what whoever submitted it waits for.
        since: when a worker was last given it, on the queue's clock.
        workers: the workers that have it now.
        losses: how many workers were lost while they had it.
        done: whether a worker has finished it.
    """

    call: tuple[Any, ...]
    result: Future[Any] = field(default_factory=Future)
    since: float = 0.0
    workers: set[int] = field(default_factory=set)
    losses: int = 0
    done: bool = False

    @property
    def abandoned(self) -> bool:
        """Whether no worker has it, and none has finished it."""
        return not self.workers and not self.done


class WorkQueue:
    """Pieces that wait, and workers with one piece each or none. It starts nothing itself, and has no lock.

    Args:
        workers: the workers' numbers.
        copies: whether a worker with nothing to do is given a copy of an overdue piece, so that a slow machine delays
            nobody. Such work must have no effect but its result.
        clock: seconds.
    """

    def __init__(self, workers: Iterable[int], copies: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle = deque(workers)
        self._busy: dict[int, tuple[Piece, float]] = {}
        """Worker → its piece, and since when it has it."""
        self._doubted: set[int] = set()
        """Idle workers that have to answer before they are given anything."""
        self._waiting: deque[Piece] = deque()
        self._copies = copies
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=_LAST)

    @property
    def workers(self) -> int:
        """Number of workers that were not lost."""
        return len(self._idle) + len(self._busy) + len(self._doubted)

    def add(self, piece: Piece, first: bool = False) -> None:
        """Let a piece wait; `first`: before all others."""
        (self._waiting.appendleft if first else self._waiting.append)(piece)

    def next_start(self) -> tuple[int, Piece] | None:
        """Return a worker and the piece that it is to begin now; None if there is no such pair."""
        if not self._idle:
            return None
        piece = self._waiting.popleft() if self._waiting else self._oldest()
        if piece is None or (piece.workers and self._left(piece) > 0):
            return None
        worker = self._idle.popleft()
        piece.since = self._clock()
        piece.workers.add(worker)
        self._busy[worker] = piece, piece.since
        return worker, piece

    def seconds_to_wait(self) -> float | None:
        """Return in how many seconds a piece will be overdue that an idle worker could take; None: none will."""
        oldest = self._oldest() if self._idle and not self._waiting else None
        return None if oldest is None else self._left(oldest)

    def finished(self, worker: int) -> tuple[Piece, bool]:
        """Note that a worker has finished its piece; return the piece, and whether this is the first time."""
        piece, since = self._leave(worker)
        self._idle.append(worker)
        first, piece.done = not piece.done, True
        if first:
            self._seconds.append(self._clock() - since)
        return piece, first

    def released(self, worker: int) -> None:
        """Note that a worker does not do the piece that it was to begin, because nobody waits for it."""
        piece, _ = self._leave(worker)
        piece.done = True
        self._idle.append(worker)

    def lost(self, worker: int) -> Piece:
        """Note that a worker is lost, and return the piece that it had."""
        piece, _ = self._leave(worker)
        piece.losses += 1
        return piece

    def doubt_idle(self) -> list[int]:
        """Return the idle workers; none of them is given anything until it `answered`."""
        doubted = [*self._idle]
        self._idle.clear()
        self._doubted.update(doubted)
        return doubted

    def answered(self, worker: int, alive: bool) -> None:
        """Note that a doubted worker is there, or is lost."""
        if worker in self._doubted:
            self._doubted.discard(worker)
            if alive:
                self._idle.append(worker)

    def drop_unfinished(self, waiting_alone: bool = False) -> list[Piece]:
        """Return the pieces that are not finished, or of them those that wait; they are given to no worker any more."""
        dropped = [*self._waiting]
        self._waiting.clear()
        if not waiting_alone:
            dropped += {id(piece): piece for piece, _ in self._busy.values() if not piece.done}.values()
        for piece in dropped:
            piece.done = True
        return dropped

    def _leave(self, worker: int) -> tuple[Piece, float]:
        piece, since = self._busy.pop(worker)
        piece.workers.discard(worker)
        return piece, since

    def _oldest(self) -> Piece | None:
        """Return the piece that was given to a worker the longest time ago, of those that may be copied."""
        left = [piece for piece, _ in self._busy.values() if len(piece.workers) < _MOST_COPIES and not piece.done]
        return min(left, key=lambda piece: piece.since) if self._copies and self._seconds and left else None

    def _left(self, piece: Piece) -> float:
        """Return the seconds until a piece is overdue."""
        return piece.since + max(_OVERDUE * max(self._seconds), _AT_LEAST) - self._clock()
