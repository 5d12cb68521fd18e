"""Answers that the engine writes: rows of several models share steps, and new rows join between steps."""

from __future__ import annotations

import re
import secrets
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typing_extensions import override

from silotune.data.tokenized import TokenizedRows
from silotune.models.forward.decoding import start_decoding
from silotune.models.forward.generation import end_tokens
from silotune.models.forward.row_mixes import Mixed, RowMixes
from silotune.models.forward.search import Steps
from silotune.models.heads.lm import LanguageModelHead, prompt_rows
from silotune.serve.jobs import Job, Reason, TextPiece, TokenScore, Write
from silotune.serve.models import Served

_UNFINISHED = "\ufffd"
"""What a tokenizer makes of a character whose bytes are not all there yet."""


@dataclass(eq=False)
class Answer:
    """One answer that is being written.

    Args:
        mix: what acts on it; weights of its own have shape (1,).
        choice: which of the job's answers.
        limit: the most tokens.
        ends: tokens after which it is complete.
    """

    job: Job
    work: Write
    served: Served
    prompt: list[int]
    mix: Mixed
    choice: int
    limit: int
    ends: Set[int]
    ids: list[int] = field(default_factory=list)
    draws: torch.Generator = field(default_factory=torch.Generator)
    done: bool = False
    _prefix: str = ""
    _scores: list[TokenScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Seed the draws: choices of one seed differ, and a row's draws do not depend on its batch."""
        seed = secrets.randbits(62) if self.work.seed is None else self.work.seed
        self.draws.manual_seed((seed + self.choice) % 2**63)

    def take(self, token: int, scores: Tensor) -> None:
        """Append a token, and deliver the text that can no longer change."""
        ended = token in self.ends
        if not ended:
            self.ids.append(token)
            if self.work.logprobs is not None:
                self._scores.append(self._score(token, scores.float().log_softmax(-1)))
        full = len(self.ids) >= self.limit
        self.done = ended or full
        if not (self.done or self.work.stream or self.work.stop):
            return
        text = str(self._tokenizer.decode(self.ids, skip_special_tokens=True))
        stops = [place for stop in self.work.stop if (place := text.find(stop)) >= 0]
        if stops:
            text, self.done = text[: min(stops)], True
        if not self.done:
            text = text[: len(text) - _held_back(text, self.work.stop)]
        if self.done or (self.work.stream and len(text) > len(self._prefix)):
            reason: Reason | None = None if not self.done else "stop" if stops or ended else "length"
            new, tokens = text[len(self._prefix) :], self._scores
            self._prefix, self._scores = text, []
            digest, length = self.served.digest, len(self.prompt)
            self.job.deliver(TextPiece(self.choice, new, digest, length, len(self.ids), tokens, reason))

    @property
    def _tokenizer(self) -> Any:
        return self.served.backbone.tokenizer

    def _score(self, token: int, logs: Tensor, likeliest: bool = True) -> TokenScore:
        text = str(self._tokenizer.decode([token]))
        best = logs.topk(self.work.logprobs or 0).indices.tolist() if likeliest else []
        scores = [self._score(one, logs, likeliest=False) for one in best]
        return TokenScore(text, token_bytes(self._tokenizer, token, text), float(logs[token]), scores)


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """Return a token's bytes, also where they are a part of a character and its text therefore has a U+FFFD."""
    piece = tokenizer.convert_ids_to_tokens(token) if _UNFINISHED in text else None
    if piece is None:
        return text.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # SentencePiece falls back to bytes so
        return bytes.fromhex(piece[3:5])
    letters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    alphabet = {letter: byte for byte, letter in letters.items()}  # of byte-level BPE
    return bytes(alphabet[letter] for letter in piece) if alphabet.keys() >= {*piece} else text.encode()


def answers_of(job: Job, served: Served, work: Write, rows: TokenizedRows) -> list[Answer]:
    """Return a job's answers to a prompt, the one row, before their first token."""
    (prompt,) = prompt_rows(rows).ids
    mix = served.predictor.mix(served.predictor.weigh(rows))
    head = served.model.context.head
    assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
    limit = work.max_tokens or head.generation.max_new_tokens
    if not served.backbone.base.config.is_encoder_decoder:
        limit = min(limit, served.window - len(prompt))
    ends = end_tokens(served.backbone)
    return [Answer(job, work, served, prompt, mix, choice, limit, ends) for choice in range(work.choices)]


class AnswerGroup(Steps[Answer]):
    """Answers of several models whose steps are shared.

    Args:
        answers: before their first token, of models with one `Served.key`, or of one prompt.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        served = answers[0].served
        self.key: Hashable = served.key
        mixes, order = RowMixes.merged([answer.mix for answer in answers], [1] * len(answers))
        ordered = [answers[row] for row in order.tolist()]
        with torch.no_grad():
            super().__init__(start_decoding(served.backbone, [answer.prompt for answer in ordered], mixes), ordered)
        super().step()

    @override
    def step(self) -> None:
        self.drop([answer.job.is_over() for answer in self.rows])
        if self.rows:
            super().step()

    @override
    def join(self, other: Steps[Answer]) -> bool:
        return isinstance(other, AnswerGroup) and self.key == other.key is not None and super().join(other)

    @override
    def choose(self, scores: Tensor) -> Tensor:
        return choose(scores, self.rows)


def choose(scores: Tensor, answers: Sequence[Answer]) -> Tensor:
    """Choose each answer's next token by scores (rows, words): the likeliest, or one drawn by temperature and top_p."""
    tokens = scores.argmax(-1)
    drawn = [row for row, answer in enumerate(answers) if answer.work.temperature > 0]
    if not drawn:
        return tokens
    works = [answers[row].work for row in drawn]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device).unsqueeze(1)

    chances = (scores[drawn].float() / column([work.temperature for work in works])).softmax(-1)
    chances, order = chances.sort(-1, descending=True)
    before = chances.cumsum(-1) - chances
    chances = chances.masked_fill(before >= column([work.top_p for work in works]), 0.0)
    chances[:, 0] = chances[:, 0].clamp(min=1e-30)  # the likeliest stays whatever top_p
    places = column([float(torch.rand((), generator=answers[row].draws)) for row in drawn])
    reached = chances.cumsum(-1)
    at = (reached <= places * reached[:, -1:]).sum(-1).clamp(max=chances.shape[1] - 1)
    tokens[drawn] = order.gather(1, at.unsqueeze(1)).squeeze(1)
    return tokens


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end may yet become another character, or a text that ends the answer."""
    if text.endswith(_UNFINISHED):
        return len(text) - len(text.rstrip(_UNFINISHED))
    longest = max(map(len, stops), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)
