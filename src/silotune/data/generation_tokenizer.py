"""`GenerationTokenizer` tokenizes rows of generation tasks as prompt and answer, whose tokens are the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from silotune.data.chat_rows import ConversationEncoder
from silotune.data.chat_template import ChatTemplate
from silotune.data.instructions import lists_options
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.templates import CHAT, FillTemplate, encode_fitting
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Sequence:
    """One row: token ids, positions that predict targets, the targets, and the number of tokens before the answer."""

    ids: list[int]
    reads: list[int]
    targets: list[int]
    prompt: int


@dataclass(frozen=True)
class GenerationTokenizer:
    """Tokenizes instructions and conversations.

    A decoder-only model's prompt is cut to `room`, however short its answer is, so that it is the same in training and
    in generation. An answer that does not fit behind it is cut and then has no end token.

    Args:
        tokenizer: a tokenizer with offsets (any fast tokenizer).
        template: makes prompts; conversations need a `ChatTemplate`.
        max_length: the most tokens of a row.
        room: the most tokens of a prompt.
        decoder_start: an encoder–decoder's first decoder token; None for a decoder-only model.
        last_only: whether only the assistant's last turn in a conversation is trained.
        pairs: whether training rows are preference pairs; each becomes two sequences.
    """

    tokenizer: PreTrainedTokenizerBase
    template: FillTemplate
    max_length: int
    room: int
    decoder_start: int | None = None
    last_only: bool = False
    pairs: bool = False

    @cached_property
    def end(self) -> int:
        """The token that ends an answer: the chat template's turn end, else the tokenizer's end token."""
        end = self.template.turn_end_id if isinstance(self.template, ChatTemplate) else None
        return int(self._any.eos_token_id) if end is None else end

    @property
    def _any(self) -> Any:
        return self.tokenizer

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Tokenize rows of one task."""
        answered = [row for row in rows if row.answer]
        if any(bool(row.rejected) is not self.pairs for row in answered):
            found, head = ("no preference pairs", "lm") if self.pairs else ("preference pairs", "dpo")
            raise InputError(f"head: the rows of task {task.name!r} are {found}; allowed: {head}")
        pairs = self.pairs and bool(answered)
        if pairs:
            rows = [one for row in rows for one in (row, replace(row, answer=row.rejected))]
        labels = torch.zeros(len(rows), dtype=torch.int64)
        if not rows:
            return TokenizedRows(task, [], None, labels, reads=[], targets=[], answers=[])
        answers, options = [row.answer for row in rows], all(map(lists_options, rows))
        if self.decoder_start is not None:
            return replace(self._encoder_decoder(task, rows, labels, answers, options), pairs=pairs)
        single = iter(self._prompt_and_answer([row for row in rows if not row.turns]))
        sequences = [self._numbered(task, n, row) if row.turns else next(single) for n, row in enumerate(rows)]
        return TokenizedRows(
            task,
            [sequence.ids for sequence in sequences],
            None,
            labels,
            reads=[sequence.reads for sequence in sequences],
            targets=[sequence.targets for sequence in sequences],
            answers=answers,
            prompts=[sequence.prompt for sequence in sequences],
            options=options,
            pairs=pairs,
        )

    def _prompts_and_answers(self, rows: Sequence[Row]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts, cut to fit, and of the answers, without their end."""
        special = not isinstance(self.template, ChatTemplate)
        texts = [row.texts for row in rows]
        encoded = encode_fitting(self.tokenizer, self.template, texts, self.room, special_tokens=special)
        answers = self._any([row.answer for row in rows], add_special_tokens=False)["input_ids"]
        return [prompt.ids for prompt in encoded], answers

    def _encoder_decoder(
        self, task: Task, rows: Sequence[Row], labels: torch.Tensor, answers: list[str], options: bool
    ) -> TokenizedRows:
        if any(row.turns for row in rows):
            raise InputError(f"task {task.name!r}: conversations need a decoder-only backbone, not an encoder-decoder")
        prompts, answer_ids = self._prompts_and_answers(rows)
        responses = [[*ids, self.end][: self.max_length] for ids in answer_ids]
        assert self.decoder_start is not None, "of an encoder-decoder"
        decoder = [[self.decoder_start, *response[:-1]] for response in responses]
        reads = [list(range(len(response))) for response in responses]
        return TokenizedRows(
            task, prompts, None, labels, decoder, reads=reads, targets=responses, answers=answers, options=options
        )

    def _prompt_and_answer(self, rows: Sequence[Row]) -> list[_Sequence]:
        if not rows:
            return []
        eos, sequences = int(self._any.eos_token_id), []
        for prompt, answer in zip(*self._prompts_and_answers(rows), strict=True):
            prompt = prompt[:-1] if prompt[-1] == eos else prompt
            response = [*answer, self.end][: self.max_length - len(prompt)]
            reads = list(range(len(prompt) - 1, len(prompt) + len(response) - 1))
            sequences.append(_Sequence([*prompt, *response], reads, response, len(prompt)))
        return sequences

    def _numbered(self, task: Task, place: int, row: Row) -> _Sequence:
        """Tokenize a conversation; an error names its row."""
        try:
            return self._conversation(task, row)
        except InputError as error:
            number = 1 + (place // 2 if self.pairs and row.answer else place)
            raise InputError(f"row {number}: {error}") from error

    def _conversation(self, task: Task, row: Row) -> _Sequence:
        encode = self._encoder(task)
        if not row.answer:  # only to be answered
            prompt = encode.prompt(row.turns)
            return _Sequence([*prompt, self.end], [len(prompt) - 1], [self.end], len(prompt))
        encoded = encode(row.turns, row.answer)
        targets = [place for place, trained in enumerate(encoded.trained) if trained and place]
        return _Sequence(
            encoded.ids, [place - 1 for place in targets], [encoded.ids[place] for place in targets], encoded.prompt
        )

    def _encoder(self, task: Task) -> ConversationEncoder:
        if not isinstance(self.template, ChatTemplate):
            raise InputError(f"head.template: the rows of task {task.name!r} are conversations; allowed: {CHAT}")
        return ConversationEncoder(self.tokenizer, self.template, self.last_only, self.room, self.max_length)
