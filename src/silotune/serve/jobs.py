"""What is asked of the engine and what it answers, and the bounded queue between, fair to those who ask."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from silotune.data.kinds import Prediction
from silotune.runs.personal_model import Text

Reason = Literal["stop", "length"]

Wanted = Literal["answers", "labels", "spans", "vectors", "weights"]


class Refusal(Exception):
    """Raised or delivered when the server turns a request down: the error's message, HTTP status and code."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


@dataclass(frozen=True)
class Score:
    """Texts whose labels, spans, pooled states or weights of parts are wanted."""

    texts: Sequence[Text]
    wanted: Wanted = "labels"


@dataclass(frozen=True)
class Write:
    """A prompt to be answered.

    Args:
        prompt: an instruction, or a conversation.
        choices: how many answers.
        max_tokens: of an answer, with its end token; None: as many as the run's head.
        temperature: 0 takes the likeliest token.
        seed: of the draws; the answers of one seed are the same.
        logprobs: how many of the likeliest tokens are returned with each written one; None: no log-probabilities.
        stream: whether pieces are delivered as they are written.
    """

    prompt: Text
    choices: int = 1
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class Scored:
    """The answer to `Score`: by text, what was wanted."""

    digest: str
    tokens: int
    predictions: Sequence[Prediction] = ()
    labels: Sequence[str] = ()
    vectors: Sequence[Sequence[float]] = ()
    weights: Sequence[dict[str, object]] = ()


@dataclass(frozen=True)
class TokenScore:
    """A token, the logarithm of its probability, and of a written one the likeliest tokens in its place.

    `content` are its bytes. Those of several tokens may make one character; the text of each is then U+FFFD.
    """

    token: str
    content: bytes
    logprob: float
    likeliest: Sequence[TokenScore] = ()


@dataclass(frozen=True)
class TextPiece:
    """New text of an answer; the last piece of a choice has a reason: `stop` or `length`."""

    choice: int
    text: str
    digest: str
    prompt_tokens: int
    tokens: int
    scores: Sequence[TokenScore] = ()
    reason: Reason | None = None


Event = Scored | TextPiece | Refusal


@dataclass(eq=False)
class Job:
    """One request."""

    model: str
    owner: str
    work: Score | Write
    deliver: Callable[[Event], None]
    deadline: float
    ended: bool = False

    @property
    def rows(self) -> int:
        """How many rows it takes in a batch."""
        return len(self.work.texts) if isinstance(self.work, Score) else self.work.choices

    def fail(self, refusal: Refusal) -> None:
        """Deliver why there is no answer, once."""
        if not self.ended:
            self.ended = True
            self.deliver(refusal)

    def is_over(self) -> bool:
        """Return whether the job has ended: answered, left by its client, or past its deadline, which fails it."""
        if time.monotonic() > self.deadline:
            self.fail(Refusal("it took longer than the server's time limit", 504, "timeout"))
        return self.ended


class FairQueue:
    """Jobs that wait: those of each owner in order, the owners in turn.

    Args:
        bound: how many jobs may wait; those of one owner at most half as many.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._count

    def put(self, job: Job) -> None:
        """Add a job, or refuse it if too many wait."""
        with self._changed:
            own = self._waiting.setdefault(job.owner, deque())
            if self._closed or self._count >= self._bound or len(own) > self._bound // 2:
                if not own:
                    del self._waiting[job.owner]
                raise Refusal("too many requests wait; try again soon", 429, "rate_limit_exceeded")
            own.append(job)
            self._count += 1
            self._changed.notify()

    def take(self, score_rows: int, write_rows: int, wait: bool) -> list[Job]:
        """Take the next jobs of all owners in turn, as many as fit; a job that is larger than all room comes alone."""
        rooms = {Score: score_rows, Write: write_rows}
        whole = dict(rooms)
        jobs: list[Job] = []
        with self._changed:
            while wait and not self._count and not self._closed:
                self._changed.wait()
            passed = 0
            while self._waiting and passed < len(self._waiting):
                owner, own = next(iter(self._waiting.items()))
                self._waiting.move_to_end(owner)
                kind = type(own[0].work)
                if own[0].rows > rooms[kind] and not (rooms[kind] == whole[kind] > 0):
                    passed += 1
                    continue
                passed = 0
                job = own.popleft()
                self._count -= 1
                rooms[kind] -= job.rows
                jobs.append(job)
                if not own:
                    del self._waiting[owner]
        return jobs

    def close(self) -> list[Job]:
        """Take no more jobs, and return those that wait."""
        with self._changed:
            self._closed = True
            jobs = [job for own in self._waiting.values() for job in own]
            self._waiting.clear()
            self._count = 0
            self._changed.notify()
        return jobs
