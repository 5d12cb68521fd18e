"""Write answers token by token: in steps that rows share, of which greedy search is the plainest, or with beams."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from silotune.models.forward.decoding import Decoding

_Options = cast(Any, GenerationConfig)


class OpenAnswer(Protocol):
    """An answer that is being written."""

    done: bool

    def take(self, token: int, scores: Tensor) -> None:
        """Append a token; `scores`, shape (words,), are those that it was chosen by."""


AnyAnswer = TypeVar("AnyAnswer", bound=OpenAnswer)


class Steps(Generic[AnyAnswer]):
    """Writes answers in steps of one token each; an answer that is done leaves the batch.

    The rows of the decoding have not begun; there is one answer for each, in their order.
    """

    def __init__(self, decoding: Decoding, rows: Sequence[AnyAnswer]) -> None:
        self.decoding, self.rows = decoding, list(rows)
        self._tokens: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Write one more token of every answer."""
        scores = self.decoding.first() if self._tokens is None else self.decoding.next(self._tokens)
        self._tokens = self.choose(scores)
        for row, token, own in zip(self.rows, self._tokens.tolist(), scores, strict=True):  # one transfer per token
            row.take(token, own)
        self.drop([row.done for row in self.rows])

    def choose(self, scores: Tensor) -> Tensor:
        """Choose each answer's next token, shape (rows,), by the scores of all tokens, shape (rows, words)."""
        return scores.argmax(-1)

    def drop(self, gone: Sequence[bool]) -> None:
        """Let answers leave."""
        if not any(gone):
            return
        places = [place for place, flag in enumerate(gone) if not flag]
        self.rows = [self.rows[place] for place in places]
        if places:
            index = torch.tensor(places, device=self.decoding.device)
            self.decoding.select(index)
            self._tokens = None if self._tokens is None else self._tokens[index]

    def join(self, other: Steps[AnyAnswer]) -> bool:
        """Take other answers into these steps, both of which have begun; returns whether that can be."""
        if not self.decoding.joins:
            return False
        order = self.decoding.join(other.decoding)
        both, tokens = self.rows + other.rows, [each for each in (self._tokens, other._tokens) if each is not None]
        self.rows = [both[row] for row in order.tolist()]
        self._tokens = torch.cat(tokens)[order.to(self.decoding.device)]
        return True


@dataclass
class _Greedy:
    """The likeliest tokens until one ends the answer."""

    ends: Set[int]
    limit: int
    ids: list[int] = field(default_factory=list)
    done: bool = False

    def take(self, token: int, scores: Tensor) -> None:
        if token not in self.ends:
            self.ids.append(token)
        self.done = token in self.ends or len(self.ids) >= self.limit


def greedy(
    begin: Callable[[Sequence[int]], Decoding],
    rows: Sequence[int],
    rows_at_once: int,
    ends: Set[int],
    max_new_tokens: int,
    follow: Callable[[list[int]], None] | None = None,
) -> list[list[int]]:
    """Append the likeliest token to every row until it ends the answer.

    When half of the rows are done, waiting ones take their places, because a step takes hardly less time for a few rows
    than for many.

    Args:
        begin: starts the decoding of some of the rows.
        rows: the rows, in the order in which they begin.
        rows_at_once: the most rows that grow at a time.
        ends: tokens that end an answer.
        max_new_tokens: the longest answer.
        follow: called after each token with the first row's answer so far.

    Returns:
        Token ids per row without the end token.
    """
    answers = [_Greedy(ends, max_new_tokens) for _ in rows]
    steps, begun = Steps(begin(rows[:rows_at_once]), answers[:rows_at_once]), rows_at_once
    while steps.rows:
        steps.step()
        if follow is not None:
            follow(answers[0].ids)
        free = rows_at_once - len(steps.rows)
        ready = not steps.rows or (steps.decoding.joins and 2 * free >= rows_at_once)
        if begun < len(rows) and ready:
            new = slice(begun, begun + free)
            more, begun = Steps(begin(rows[new]), answers[new]), new.stop
            if not steps.rows:
                steps = more
                continue
            more.step()
            if more.rows:
                steps.join(more)
    return [answer.ids for answer in answers]


def beam_search(decoding: Decoding, ends: Set[int], beams: int, max_new_tokens: int) -> list[list[int]]:
    """Have transformers' `generate` search for the answer with the highest mean log-probability per token.

    Arguments and result as for `greedy`; `beams` answers of each row are open at a time.
    """
    rows, device = decoding.rows, decoding.device
    options = _Options(num_beams=beams, do_sample=False, max_new_tokens=max_new_tokens, use_cache=False)
    options.eos_token_id, options.pad_token_id = sorted(ends), -1
    begun = torch.full((rows, 1), 0, device=device)  # a column that stands for the prompt
    written = cast(Any, _GenerationModel(decoding, beams)).generate(begun, generation_config=options)
    answers: list[list[int]] = written[:, 1:].tolist()
    return [ids[: next((at for at, token in enumerate(ids) if token in ends), len(ids))] for ids in answers]


class _GenerationModel(GenerationMixin):
    """Wraps a `Decoding` as a transformers model, so that `generate` can run beam search on it."""

    main_input_name = "input_ids"

    def __init__(self, decoding: Decoding, beams: int) -> None:
        self._first: Tensor | None = decoding.first()
        self.config, self.generation_config = PretrainedConfig(), _Options()
        cast(Any, self.config).vocab_size = self._first.shape[-1]  # transformers 5.17 asks for it
        self.device = decoding.device
        self._decoding, self._beams = decoding, beams

    def __call__(self, input_ids: Tensor, **_: Any) -> Any:
        """Score the token after `input_ids`, shape (rows · beams,)."""
        if self._first is None:
            scores = self._decoding.next(input_ids)
        else:
            repeated = torch.arange(self._decoding.rows, device=self.device).repeat_interleave(self._beams)
            scores, self._first = self._first[repeated], None
            self._decoding.select(repeated)
        return CausalLMOutputWithPast(logits=cast(Any, scores.unsqueeze(1)), past_key_values=cast(Any, self._decoding))

    forward = __call__

    def prepare_inputs_for_generation(self, input_ids: Tensor, *_: Any, **__: Any) -> dict[str, Any]:
        """Return inputs with only the newest token, because the decoding keeps the earlier ones."""
        return {"input_ids": input_ids[:, -1]}

    def get_experts_implementation(self) -> dict[str, str]:
        """Leave mixtures of experts as they are."""
        return {}

    @staticmethod
    def _reorder_cache(decoding: Decoding, beams: Tensor) -> Decoding:
        decoding.select(beams.long())
        return decoding
