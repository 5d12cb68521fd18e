"""Rows as token ids, with the labels and positions that heads read; how many of them are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from silotune.data.long_texts import CUT, LongTexts, encode
from silotune.data.rows import Row, SiloData
from silotune.data.targets import joined_targets, target_tensor
from silotune.data.tasks import Task
from silotune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


READ_ROWS, READ_POSITIONS, READ_TARGETS = "read_rows", "read_positions", "read_targets"
"""Inputs of a micro-batch that tell a language-model head which positions to read, each of shape (reads,): the row in
the micro-batch, the position in its tokens (decoder tokens, if the row has any), and the target token there."""

SOFT_AT = "soft_at"
"""Input of shape (rows,): the token before which each row's soft prompt goes. Without it, before the first."""

_LISTS = (
    *("types", "windows", "decoder", "reads", "targets", "answers", "prompts", "soft", "units", "choices", "sizes"),
)
"""Fields of `TokenizedRows` with one entry per row."""

READ_COUNTS = "read_counts"
"""Input of shape (rows,): how many positions of each row are read."""

WINDOWS = "windows"
"""Input of shape (rows, most windows) where rows are read in windows: 1 at each window of a row, which are sequences
that follow each other, 2 at those behind that only fill up, 0 at those that are not there."""

HEAD_INPUTS = (READ_ROWS, READ_POSITIONS, READ_TARGETS, READ_COUNTS, WINDOWS)
"""Inputs that say how states are read, and are none of the backbone's."""

HOST_INPUTS = (READ_COUNTS, WINDOWS)
"""Inputs that stay on the CPU, because they are sizes."""


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of one task as token ids.

    Args:
        task: the task of all rows.
        ids: token ids per row; of a row in windows those of all, one window behind the other.
        types: segment ids per row (`token_type_ids`), 0 or 1 per token; None if the tokenizer gives none.
        labels: what outputs are compared with, as `target_tensor` makes it: class indices, shape (rows,), int64, or
            float32 numbers, shape (rows,), or marks of several labels, shape (rows, labels).
        decoder: decoder token ids per row (encoder-decoder models).
        reads: positions per row that a head reads: of answers' tokens, or of words.
        targets: target token at each of these positions.
        answers: reference text per row (generation).
        prompts: number of tokens per row before the answer (generation, decoder-only models).
        soft: per row, the token before which its soft prompt goes; without it, the first.
        options: whether every prompt lists the allowed answers.
        poisoned: number of rows that an attacker added; they are trained on but excluded from all statistics.
        choices: per row, the answers that its prompt lists, where all rows have some.
        units: per row, its unit (`privacy.unit`; of held-out rows also `evaluation.unit`); None: every row is one.
        sizes: per row, its number of sequences, where rows have several: a preference pair's chosen answer, then its
            rejected one; or a query, its passage and its negatives. `ids`, `labels` and so on then have one entry for
            each sequence.
        shares: how much a held-out row of each label counts in scores, shape (classes,), float64; None: each 1.
        windows: numbers of tokens of each row's windows; None where rows are not read in windows.
    """

    task: Task
    ids: list[list[int]]
    types: list[list[int]] | None
    labels: Tensor
    decoder: list[list[int]] | None = None
    reads: list[list[int]] | None = None
    targets: list[list[int]] | None = None
    answers: list[str] | None = None
    prompts: list[int] | None = None
    soft: list[int] | None = None
    options: bool = False
    poisoned: int = 0
    units: list[str] | None = None
    choices: list[list[str]] | None = None
    shares: Tensor | None = None
    sizes: list[int] | None = None
    windows: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def clean_count(self) -> int:
        """Number of rows, not counting rows that an attacker added."""
        return self.examples - self.poisoned

    @property
    def weights(self) -> Tensor | None:
        """How much each row counts in scores, shape (rows,), float64; None: each 1."""
        return None if self.shares is None else self.shares[self.labels]

    @property
    def judges(self) -> bool:
        """Whether there are rows that count in scores."""
        return self.examples > 0 and (self.shares is None or bool(self.shares.any()))

    @property
    def examples(self) -> int:
        """Number of rows as the files have them: a preference pair is one."""
        return len(self.ids) if self.sizes is None else len(self.sizes)

    @property
    def pairs(self) -> bool:
        """Whether rows are preference pairs."""
        return self.sizes is not None and not self.task.labeled

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.sizes or ())]

    def sequences(self, examples: Sequence[int]) -> list[int]:
        """Return the indices of these rows' token ids: of both answers of a pair."""
        if self.sizes is None:
            return list(examples)
        return [place for row in examples for place in range(self._ends[row], self._ends[row + 1])]

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest row, or window."""
        return max(map(self.width, range(len(self))))

    @cached_property
    def most_windows(self) -> int:
        """Number of windows of the row with most; 1 where rows are not read in windows."""
        return max(map(len, self.windows or [[0]]))

    @property
    def sequence_count(self) -> int:
        """Number of sequences of all rows: of their windows, where they are read so."""
        return sum(map(self.passes, range(len(self))))

    def width(self, row: int) -> int:
        """Return the number of tokens of a row, or of its longest window."""
        return len(self.ids[row]) if self.windows is None else max(self.windows[row])

    def passes(self, row: int) -> int:
        """Return in how many sequences a row goes through the backbone."""
        return 1 if self.windows is None else len(self.windows[row])

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return where a row's sequences begin and end among its tokens."""
        lengths = [len(self.ids[row])] if self.windows is None else self.windows[row]
        return [*pairwise(accumulate(lengths, initial=0))]

    def thinned(self, most: int, draws: Callable[[int], torch.Generator]) -> TokenizedRows:
        """Return the same rows with at most so many windows each, drawn by a generator for the row.

        Positions that are read in other windows are not read; the same object, if no row has more.
        """
        if self.windows is None or self.most_windows <= most:
            return self
        spans = [*map(self.spans, range(len(self)))]
        for row, own in enumerate(spans):
            sample = torch.randperm(len(own), generator=draws(row))[:most].sort()[0]
            spans[row] = [own[place] for place in sample.tolist()]

        def of_windows(lists: list[list[int]]) -> list[list[int]]:
            pairs = zip(lists, spans, strict=True)
            return [[token for start, end in own for token in tokens[start:end]] for tokens, own in pairs]

        labels, reads = self.labels.clone(), list[list[int]]()
        for row, positions in enumerate(self.reads or ()):
            there = {at: place for place, at in enumerate(at for start, end in spans[row] for at in range(start, end))}
            columns = (labels[row] >= 0).nonzero().flatten()
            unread = columns[torch.tensor([at not in there for at in positions], dtype=torch.bool)]
            labels[row, unread] = -1 - labels[row, unread]
            reads.append([there[at] for at in positions if at in there])
        return replace(
            self,
            ids=of_windows(self.ids),
            types=None if self.types is None else of_windows(self.types),
            labels=labels,
            reads=None if self.reads is None else reads,
            windows=[[end - start for start, end in own] for own in spans],
        )

    @cached_property
    def longest_decoder(self) -> int:
        """Number of decoder tokens of the row with most; 0 without a decoder."""
        return max(map(len, self.decoder or [[]]))

    def first(self, count: int) -> TokenizedRows:
        """Return the first rows, each of one sequence."""
        lists = {name: value[:count] for name in _LISTS if (value := getattr(self, name)) is not None}
        return replace(self, ids=self.ids[:count], labels=self.labels[:count], **lists)

    def concatenated(self, other: TokenizedRows) -> TokenizedRows:
        """Return these rows followed by another set's rows of the same task."""

        def concatenate(name: str) -> list[Any] | None:
            first, second = getattr(self, name), getattr(other, name)
            return None if first is None or second is None else first + second

        lists = {name: concatenate(name) for name in _LISTS}
        labels, poisoned = joined_targets(self.labels, other.labels), self.poisoned + other.poisoned
        fields: dict[str, Any] = lists | {"options": self.options and other.options, "poisoned": poisoned}
        return TokenizedRows(self.task, self.ids + other.ids, labels=labels, **fields)


class RowTokenizer:
    """Tokenizes rows for heads that compute logits of a row.

    The model has embeddings of `segments` segment ids; 0: of any number.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, segments: int = 0, long: LongTexts = CUT
    ) -> None:
        self._tokenizer, self._long = tokenizer, long
        self._segments = segments
        self._max_length = max_length

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Tokenize rows of one text or a pair each, cut at the maximum length or in windows."""
        if not rows:
            return TokenizedRows(task, [], None, target_tensor(task, rows))
        columns = [list(texts) for texts in zip(*(row.texts for row in rows), strict=True)]
        encoded = encode(self._tokenizer, columns, self._max_length, self._long)
        types = encoded.types
        if types is not None and 0 < self._segments <= (last := max(map(max, types))):
            raise InputError(
                f"task {task.name!r}: the tokenizer gives these rows segment ids up to {last}, and the backbone has "
                f"embeddings of {self._segments}; allowed: one text a row, or another backbone"
            )
        return TokenizedRows(task, encoded.ids, types, target_tensor(task, rows), windows=encoded.windows)


Inputs = dict[str, Tensor]
"""Keyword arguments of a forward pass, e.g. `input_ids` of shape (rows, tokens)."""


ANY_LENGTH = 2**20
"""Tokens at which no row is cut."""

MOST_LOOKED_AT = 1000
"""Training rows of a silo that a run looks at, the first ones of the (shuffled) split."""


@dataclass(frozen=True)
class Cuts:
    """How many of some rows are cut.

    Args:
        lengths: tokens of each row as a whole.
        cut: which of them are cut, by their place.
        prompts: those among them whose prompt is cut, not only the answer.
        longest_prompt: tokens of the longest prompt; 0 where rows have none.
    """

    lengths: list[int]
    cut: list[int]
    prompts: list[int]
    longest_prompt: int

    @property
    def fraction(self) -> float:
        """The fraction of rows that are cut."""
        return len(self.cut) / max(1, len(self.lengths))


def count_cuts(
    task: Task,
    rows: Sequence[Row],
    tokenize: Callable[[Task, Sequence[Row]], TokenizedRows],
    whole: Callable[[Task, Sequence[Row]], TokenizedRows],
) -> Cuts:
    """Compare rows as they are trained with the same rows uncut."""
    actual, full = tokenize(task, rows), whole(task, rows)
    lengths, cut, prompts, longest = [], [], [], 0
    for place in range(full.examples):
        sequences = full.sequences([place])
        sizes = [_sizes(full, sequence) for sequence in sequences]
        lengths.append(max(map(sum, sizes)))
        longest = max(longest, max(prompt for prompt, _ in sizes) if full.targets is not None else 0)
        short = [_sizes(actual, sequence) for sequence in sequences]
        if short != sizes:
            cut.append(place)
        if full.targets is not None and any(a[0] < b[0] for a, b in zip(short, sizes, strict=True)):
            prompts.append(place)
    return Cuts(lengths, cut, prompts, longest)


def _sizes(rows: TokenizedRows, sequence: int) -> tuple[int, int]:
    """Return the tokens of a sequence's prompt, or of its text, and those behind it or of its decoder."""
    tokens = len(rows.ids[sequence])
    if rows.decoder is not None:
        return tokens, len(rows.decoder[sequence])
    prompt = tokens if rows.prompts is None else rows.prompts[sequence]
    return prompt, tokens - prompt


def cut_text(silo: SiloData, cuts: Cuts, max_length: int, room: int | None) -> str:
    """Say how many training rows of a silo are cut, with an example.

    `cuts` are of its first training rows; `room` is the most tokens of a prompt, None where rows have no answers.
    """
    looked, first = len(cuts.lengths), cuts.cut[0]
    text = f"silo {silo.name!r}: {len(cuts.cut)} of {looked} training rows are cut, such as row {first + 1}"
    text += f" of {cuts.lengths[first]} tokens (train.max_length={max_length}"
    if room is None:
        return f"{text})"
    text += f", of which a prompt has {room} and its answer the rest)"
    if not cuts.prompts:
        return f"{text}: their answers have no end then"
    return (
        f"{text}; {len(cuts.prompts)} lose the middle of their prompt, the longest of which has {cuts.longest_prompt}"
    )
