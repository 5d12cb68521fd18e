"""Tokenize instructions, conversations and preference pairs as prompts and the answers that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from silotune.data.chat_template import ChatTemplate, Span
from silotune.data.generation_rows import lists_options, options_of
from silotune.data.rows import Row, Turn
from silotune.data.tasks import Task
from silotune.data.templates import CHAT, FillTemplate, encode_fitting
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Sequence:
    """One row: token ids, positions that predict targets, the targets, tokens before the answer, and the answer.

    The answer is the row's own, or where it calls tools or thinks, as the template writes it.
    """

    ids: list[int]
    reads: list[int]
    targets: list[int]
    prompt: int
    answer: str


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
        end = self.template.turn_end[1] if isinstance(self.template, ChatTemplate) else None
        return self._eos if end is None else end

    @property
    def _eos(self) -> int:
        return int(cast(Any, self.tokenizer).eos_token_id)

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Tokenize rows of one task."""
        answered = [row for row in rows if row.answer]
        if any(bool(row.rejected) is not self.pairs for row in answered):
            content, head = ("no preference pairs", "lm") if self.pairs else ("preference pairs", "dpo")
            raise InputError(f"head: the rows of task {task.name!r} are {content}; allowed: {head}")
        sizes = [2] * len(rows) if self.pairs and answered else None
        if sizes is not None:
            rows = [one for row in rows for one in (row, replace(row, answer=row.rejected))]
        labels = torch.zeros(len(rows), dtype=torch.int64)
        if not rows:
            return TokenizedRows(task, [], None, labels, reads=[], targets=[], answers=[])
        answers, options = [row.answer for row in rows], all(map(lists_options, rows))
        choices = [options_of(row) for row in rows] if options else None
        if self.decoder_start is not None:
            written = self._encoder_decoder(task, rows, labels, answers, options)
            return replace(written, sizes=sizes, choices=choices)
        single = iter(self._prompt_and_answer([row for row in rows if not row.turns]))
        sequences = [self._numbered(task, n, row) if row.turns else next(single) for n, row in enumerate(rows)]
        return TokenizedRows(
            task,
            [sequence.ids for sequence in sequences],
            None,
            labels,
            reads=[sequence.reads for sequence in sequences],
            targets=[sequence.targets for sequence in sequences],
            answers=[sequence.answer for sequence in sequences],
            prompts=[sequence.prompt for sequence in sequences],
            options=options,
            sizes=sizes,
            choices=choices,
        )

    def _prompts_and_answers(self, rows: Sequence[Row]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the token ids of the prompts, truncated to fit, and of the answers, without their end token."""
        special = not isinstance(self.template, ChatTemplate)
        texts = [row.texts for row in rows]
        encoded = encode_fitting(
            self.tokenizer, self.template, texts, self.room, special_tokens=special, keep_ends=True
        )
        answers = cast(Any, self.tokenizer)([row.answer for row in rows], add_special_tokens=False)["input_ids"]
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
        sequences = []
        for row, prompt, answer in zip(rows, *self._prompts_and_answers(rows), strict=True):
            prompt = prompt[:-1] if prompt[-1] == self._eos else prompt
            response = [*answer, self.end][: self.max_length - len(prompt)]
            reads = list(range(len(prompt) - 1, len(prompt) + len(response) - 1))
            sequences.append(_Sequence([*prompt, *response], reads, response, len(prompt), row.answer))
        return sequences

    def _numbered(self, task: Task, place: int, row: Row) -> _Sequence:
        """Tokenize a conversation; an error names its row."""
        try:
            return self._conversation(task, row)
        except InputError as error:
            number = 1 + (place // 2 if self.pairs and row.answer else place)
            raise InputError(f"row {number}: {error}") from error

    def _conversation(self, task: Task, row: Row) -> _Sequence:
        """Tokenize a conversation, shortened if necessary.

        Too many turns lose the oldest, then the texts of the others are cut; the answer stays, and is cut last. An
        answer without a turn end in the template ends with the tokenizer's end token.
        """
        template = self.template
        if not isinstance(template, ChatTemplate):
            raise InputError(f"head.template: the rows of task {task.name!r} are conversations; allowed: {CHAT}")
        template = template.with_tools(row.tools)
        turns = self._fitting(template, list(row.turns))
        if not row.answer:  # only to be answered
            prompt = self._encode(template.prompt(turns))[0]
            return _Sequence([*prompt, self.end], [len(prompt) - 1], [self.end], len(prompt), "")
        text, spans, begin = template.answers([*turns, row.conversation[-1]], self.last_only, row.untrained)
        ids, offsets, before = self._tokens(text, sorted({begin, *(span[0] for span in spans)}), begin)
        trained = [place for place, (at, _) in enumerate(offsets) if any(first <= at < end for first, end in spans)]
        if not template.turn_end[0]:
            ids, trained = [*ids, self._eos], [*trained, len(ids)]
        trained = [place for place in trained if 0 < place < self.max_length]
        return _Sequence(
            ids[: self.max_length],
            [place - 1 for place in trained],
            [ids[place] for place in trained],
            before,
            str(cast(Any, self.tokenizer).decode(ids[before:], skip_special_tokens=True)) if row.said else row.answer,
        )

    def _encode(self, text: str) -> tuple[list[int], list[Span]]:
        encoded = cast(Any, self.tokenizer)(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: list[Span] = []
        for begin, end in encoded["offset_mapping"]:
            # Llama 3's and Pythia's tokenizers leave spaces out: one of spaces alone would begin where the next does
            offsets.append((offsets[-1][1] if begin == end and offsets else begin, end))
        return list(encoded["input_ids"]), offsets

    def _tokens(self, text: str, begins: Sequence[int], last: int) -> tuple[list[int], list[Span], int]:
        """Tokenize a conversation so that the tokens before each answer are those of its prompt alone.

        A generated answer follows the tokens of its prompt. Where the tokenizer would merge characters on both sides of
        the boundary, the text is cut there.
        """
        cuts: list[int] = []
        ids, offsets = self._encode(text)
        number = 0
        for begin in begins:
            prompt = self._pieces(text[:begin], cuts)[0]
            if ids[: len(prompt)] != prompt:
                cuts.append(begin)
                ids, offsets = self._pieces(text, cuts)
            if begin == last:
                number = len(prompt)
        return ids, offsets, number

    def _pieces(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        offsets: list[Span] = []
        for begin, end in pairwise([0, *(cut for cut in cuts if cut < len(text)), len(text)]):
            piece_ids, piece_offsets = self._encode(text[begin:end])
            ids += piece_ids
            offsets += [(first + begin, last + begin) for first, last in piece_offsets]
        return ids, offsets

    def _fitting(self, template: ChatTemplate, turns: list[Turn]) -> list[Turn]:
        """Shorten the turns before the last answer until their prompt has at most `room` tokens."""
        while len(self._encode(template.prompt(turns))[0]) > self.room:
            first = 1 if turns[0][0] == "system" else 0
            users = [place for place, turn in enumerate(turns) if turn[0] == "user" and place > first]
            if not users:
                whole = tuple(turns)

                def fill(texts: tuple[str, ...], whole: tuple[Turn, ...] = whole) -> str:
                    return template.prompt(_with_contents(whole, texts))

                contents = tuple(turn[1] for turn in turns)
                (encoded,) = encode_fitting(
                    self.tokenizer, fill, [contents], self.room, special_tokens=False, keep_ends=True
                )
                return _with_contents(whole, encoded.texts)
            turns = [*turns[:first], *turns[users[0] :]]
        return turns


def _with_contents(turns: Sequence[Turn], contents: Sequence[str]) -> list[Turn]:
    """Return the turns with other contents."""
    return [(turn[0], content, *turn[2:]) for turn, content in zip(turns, contents, strict=True)]
