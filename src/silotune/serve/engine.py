"""The one thread that computes: it takes jobs of all silos from the queue and answers them in shared forwards."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from silotune.data.generation_rows import read_turns
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.joint import inputs_of, read
from silotune.models.forward.views import View
from silotune.models.heads.lm import LanguageModelHead, prompt_rows
from silotune.runs.personal_model import Explanation, Text, predictions
from silotune.serve.answers import Answer, Group, answers_of
from silotune.serve.jobs import Event, FairQueue, Job, Refusal, Score, Scored, Write
from silotune.serve.models import Models, Served

Item = TypeVar("Item")

_Texts = tuple[Served, list[TokenizedRows]]
"""A job's texts and their model: all of them, or each alone where every text is read under a mix of its own."""

_UNCUT = 10**6
"""Tokens at which no text is cut, so that one that is too long is refused rather than answered in part."""


@dataclass(frozen=True)
class Limits:
    """How much the engine takes on.

    Args:
        waiting: jobs in the queue.
        scored: texts of one forward.
        written: answers that are written at a time.
        begun: answers that begin between two steps, for which the others wait.
        seconds: until a job has its answer.
    """

    waiting: int = 1024
    scored: int = 64
    written: int = 32
    begun: int = 8
    seconds: float = 60.0


class Engine:
    """Answers jobs in a thread of its own, until it is stopped."""

    def __init__(self, models: Models, limits: Limits | None = None, alone: bool = False) -> None:
        self.models, self.limits, self.counts = models, limits or Limits(), Counter[str]()
        self.queue = FairQueue(self.limits.waiting)
        self._alone = alone
        self._groups: list[Group] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End, and refuse what waits."""
        self._stopped = True
        for job in self.queue.close():
            job.fail(Refusal("the server ends", 503, "unavailable"))
        self._thread.join()

    @property
    def written(self) -> int:
        """How many answers are being written."""
        return sum(len(group.rows) for group in self._groups)

    def submit(self, model: str, owner: str, work: Score | Write, deliver: Callable[[Event], None]) -> Job:
        """Queue a job; `deliver` is called by the engine's thread."""
        job = Job(model, owner, work, deliver, time.monotonic() + self.limits.seconds)
        self.queue.put(job)
        return job

    def _run(self) -> None:
        while not self._stopped:
            begun = self.limits.begun if self._groups else self.limits.written  # where nobody waits for it, all at once
            room = min(self.limits.written - self.written, begun)
            jobs = self.queue.take(self.limits.scored, max(room, 0), wait=not self._groups)
            self._begin([job for job in jobs if not job.is_over()])
            for group in self._groups:
                answers = group.rows
                self._guarded([answer.job for answer in answers], group.step)
                self.counts.update(steps=1, tokens=len(answers))
            self._groups = [group for group in self._groups if any(not answer.job.ended for answer in group.rows)]
        for group in self._groups:
            for answer in group.rows:
                answer.job.fail(Refusal("the server ends", 503, "unavailable"))

    def _guarded(self, jobs: Sequence[Job], work: Callable[[], None]) -> bool:
        """Work for jobs, which fail if it does; clients read silotune's messages, of other errors the type."""
        try:
            work()
        except Refusal as refusal:
            error = refusal
        except InputError as wrong:
            error = Refusal(str(wrong))
        except Exception as fault:
            error = Refusal(f"the model could not answer ({type(fault).__name__})", 500, "server_error")
        else:
            return True
        for job in jobs:
            job.fail(error)
        return False

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Answer jobs whose texts are scored, and begin to write the answers of others."""
        scored: dict[Hashable, list[tuple[Job, _Texts]]] = {}
        written: dict[Hashable, list[tuple[Job, list[Answer]]]] = {}
        for job in jobs:
            self._guarded([job], partial(self._sort, job, scored, written))
        for texts in scored.values():
            self._together(texts, self._score)
        for answers in written.values():
            self._together(answers, self._write)

    def _together(
        self, several: Sequence[tuple[Job, Item]], work: Callable[[Sequence[tuple[Job, Item]]], None]
    ) -> None:
        """Work for jobs that share forwards; if that fails, for each alone, so that one does not end the others'."""
        if len(several) > 1:
            with suppress(Exception):  # it is raised again below, for the job whose it is
                work(several)
                return
        for job, item in several:
            if not job.ended:
                self._guarded([job], partial(work, [(job, item)]))

    def _sort(
        self,
        job: Job,
        scored: dict[Hashable, list[tuple[Job, _Texts]]],
        written: dict[Hashable, list[tuple[Job, list[Answer]]]],
    ) -> None:
        """Open a job's model and tokenize its texts, to be answered with those that share its forwards."""
        served, work = self.models.open(job.model), job.work
        key: Hashable = job if served.key is None else (served.key, served.name if self._alone else "")
        if isinstance(work, Write):
            if not served.writes:
                raise Refusal(f"the model {job.model!r} gives labels; ask /classify", code="wrong_endpoint")
            answers = answers_of(job, served, work, _encoded(served, [_prompt(served, work)]))
            written.setdefault(key, []).append((job, answers))
            return
        if work.wanted == "weights":
            explained = [_weights(served, explanation) for explanation in served.model.explain(work.texts)]
            self._deliver(job, Scored(served.digest, 0, weights=explained))
            return
        if served.writes:
            raise Refusal(f"the model {job.model!r} writes answers; ask /v1/chat/completions", code="wrong_endpoint")
        parts = [[text] for text in work.texts] if served.key is None and served.weighs_texts else [work.texts]
        rows = [_encoded(served, part) for part in parts]
        scored.setdefault((key, inputs_of(rows[0])), []).append((job, (served, rows)))

    def _score(self, several: Sequence[tuple[Job, _Texts]]) -> None:
        (_, (served, parts)), *_ = several
        if len(parts) > 1:  # texts with mixes of their own: the only job
            views = [[view for rows in parts for view in read([(served.predictor, rows)])]]
        else:
            views = [[view] for view in read([(served.predictor, rows) for _, (served, (rows,)) in several])]
        self.counts["forwards"] += 1
        for (job, texts), own in zip(several, views, strict=True):
            self._deliver(job, _scored(job, texts, own))

    def _write(self, several: Sequence[tuple[Job, list[Answer]]]) -> None:
        answers = [answer for _, own in several for answer in own]
        group = Group(answers)
        self.counts["forwards"] += 1
        if group.rows and not any(other.join(group) for other in self._groups):
            self._groups.append(group)

    def _deliver(self, job: Job, scored: Scored) -> None:
        if not job.ended:
            job.ended = True
            job.deliver(scored)


def _prompt(served: Served, work: Write) -> Text:
    """Return a prompt as the model takes it: without a chat template, a user's only turn is an instruction."""
    head, prompt = served.model.context.head, work.prompt
    if (isinstance(head, LanguageModelHead) and head.chat) or not isinstance(prompt, list) or len(prompt) != 1:
        return prompt
    ((role, content, *_),) = read_turns(prompt, "messages")
    return content if role == "user" else prompt


def _encoded(served: Served, texts: Sequence[Text]) -> TokenizedRows:
    """Return texts as token ids, or refuse those that are too long."""
    rows = served.model.encoded(texts, _UNCUT)
    longest = max(map(len, prompt_rows(rows).ids if served.writes else rows.ids))
    if longest > served.window - served.writes:
        message = f"a text has {longest} tokens; the model {served.name!r} takes {served.window - served.writes}"
        raise Refusal(message, code="context_length_exceeded")
    return rows


def _scored(job: Job, texts: _Texts, views: Sequence[View]) -> Scored:
    """Return what a job asked for of its texts' views."""
    (served, parts), work = texts, job.work
    predictor, task = served.predictor, served.model.task
    tokens = sum(len(ids) for rows in parts for ids in rows.ids)
    if isinstance(work, Score) and work.wanted == "vectors":
        vectors = [vector for view in views for vector in view[predictor.head.pooling].tolist()]
        return Scored(served.digest, tokens, vectors=vectors)
    logits = torch.cat([predictor.logits_of(view, task) for view in views])
    return Scored(served.digest, tokens, predictions(task, logits.float().cpu()), task.labels)


def _weights(served: Served, explanation: Explanation) -> dict[str, object]:
    """Return which parts answer a text and how much; of a model trained under noise, nothing that a text decides.

    Similarities to the silo's rows are never returned: a similarity of 1 would show that a text is among them.
    """
    if served.weighs_texts and served.model.about["privacy"] is not None:
        return {"parts": sorted(explanation.mix), "alpha": None}
    return {"parts": explanation.mix, "alpha": explanation.alpha}
