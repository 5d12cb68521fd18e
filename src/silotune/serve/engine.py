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
from silotune.runs.marked_texts import MarkedTexts
from silotune.runs.personal_model import Explanation, Text, predictions
from silotune.serve.answers import Answer, AnswerGroup, answers_of
from silotune.serve.jobs import Event, FairQueue, Job, Refusal, Score, Scored, Write
from silotune.serve.models import Models, Served

Item = TypeVar("Item")

_Texts = tuple[Served, list[TokenizedRows], MarkedTexts | None]
"""A job's texts and their model: all of them, or each alone where every text is read under a mix of its own."""

_ENDPOINTS = {
    "answers": "/v1/chat/completions",
    "spans": "/v1/entities",
    "labels": "/classify",
    "vectors": "/v1/embeddings",
}

_MOST_WINDOWS = 256
"""Windows of a request whose texts are read in windows."""

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


class ServingEngine:
    """Answers jobs in a thread of its own, until it is stopped."""

    def __init__(self, models: Models, limits: Limits | None = None, alone: bool = False) -> None:
        self.models, self.limits, self.counts = models, limits or Limits(), Counter[str]()
        self.queue = FairQueue(self.limits.waiting)
        self._alone = alone
        self._groups: list[AnswerGroup] = []
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
        output = "answers" if isinstance(work, Write) else work.wanted
        if output not in (served.gives, "weights") and (output != "vectors" or served.writes):
            gives = served.gives
            raise Refusal(f"the model {job.model!r} gives {gives}; ask {_ENDPOINTS[gives]}", code="wrong_endpoint")
        if isinstance(work, Write):
            answers = answers_of(job, served, work, _encoded(served, [_prompt(served, work)]))
            written.setdefault(key, []).append((job, answers))
            return
        if work.wanted == "weights":
            explained = [_weights(served, explanation) for explanation in served.model.explain(work.texts)]
            self._deliver(job, Scored(served.digest, 0, weights=explained))
            return
        texts = self._rows(served, work)
        if texts is None:
            marked = served.model.predict(work.texts)
            self._deliver(job, Scored(served.digest, 0, marked, served.model.task.labels))
        else:
            scored.setdefault((key, inputs_of(texts[1][0])), []).append((job, texts))

    def _rows(self, served: Served, work: Score) -> _Texts | None:
        """Return a job's texts as rows; None where windows of texts share no forward, or there are none."""
        each_alone = served.key is None and served.weighs_texts
        if work.wanted != "spans":
            parts = [[text] for text in work.texts] if each_alone else [work.texts]
            return served, [_encoded(served, part) for part in parts], None
        marked = _marked(served, work.texts)
        return None if each_alone or not len(marked.rows) else (served, [marked.rows], marked)

    def _score(self, several: Sequence[tuple[Job, _Texts]]) -> None:
        (_, (served, parts, _)), *_ = several
        if len(parts) > 1:  # texts with mixes of their own: the only job
            views = [[view for rows in parts for view in read([(served.predictor, rows)])]]
        else:
            views = [[view] for view in read([(served.predictor, rows) for _, (served, (rows,), _) in several])]
        self.counts["forwards"] += 1
        for (job, texts), own in zip(several, views, strict=True):
            self._deliver(job, _scored(job, texts, own))

    def _write(self, several: Sequence[tuple[Job, list[Answer]]]) -> None:
        answers = [answer for _, own in several for answer in own]
        group = AnswerGroup(answers)
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
    """Return texts as token ids, or refuse those that are too long, or of too many windows."""
    if served.model.context.head.long_texts.in_windows:
        rows = served.model.encoded(texts)
        _check_windows(served, rows)
        return rows
    rows = served.model.encoded(texts, _UNCUT)
    longest = max(map(len, prompt_rows(rows).ids if served.writes else rows.ids))
    if longest > served.window - served.writes:
        message = f"a text has {longest} tokens; the model {served.name!r} takes {served.window - served.writes}"
        raise Refusal(message, code="context_length_exceeded")
    return rows


def _marked(served: Served, texts: Sequence[Text]) -> MarkedTexts:
    """Return texts to be marked, which may be of any length but take no more windows than a request may."""
    if not all(isinstance(text, str) for text in texts):
        raise Refusal("input: spans are marked in single texts, not in pairs")
    marked = MarkedTexts(served.model.context, served.model.task, [str(text) for text in texts])
    _check_windows(served, marked.rows)
    return marked


def _check_windows(served: Served, rows: TokenizedRows) -> None:
    if rows.sequence_count > _MOST_WINDOWS:
        message = f"the texts take {rows.sequence_count} windows of {served.window} tokens; allowed: {_MOST_WINDOWS}"
        raise Refusal(message, code="context_length_exceeded")


def _scored(job: Job, texts: _Texts, views: Sequence[View]) -> Scored:
    """Return what a job asked for of its texts' views."""
    (served, parts, marked), work = texts, job.work
    predictor, task = served.predictor, served.model.task
    tokens = sum(len(ids) for rows in parts for ids in rows.ids)
    if isinstance(work, Score) and work.wanted == "vectors":
        if served.gives == "vectors":
            pieces = [predictor.logits_of(view, task) for view in views]
        else:
            pieces = [view[predictor.head.pooling] for view in views]
        vectors = torch.cat(pieces).tolist()
        return Scored(served.digest, tokens, vectors=vectors)
    logits = torch.cat([predictor.logits_of(view, task) for view in views]).float().cpu()
    answers = predictions(task, logits) if marked is None else marked.predictions(logits)
    return Scored(served.digest, tokens, answers, task.labels)


def _weights(served: Served, explanation: Explanation) -> dict[str, object]:
    """Return which parts answer a text and how much; of a model trained under noise, nothing that a text decides.

    Similarities to the silo's rows are never returned: a similarity of 1 would show that a text is among them.
    """
    if served.weighs_texts and served.model.about["privacy"] is not None:
        return {"parts": sorted(explanation.mix), "alpha": None}
    return {"parts": explanation.mix, "alpha": explanation.alpha}
