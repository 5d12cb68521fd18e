"""Tokenized rows and the inputs of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from silotune.data.tasks import Row, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


READ_ROWS, READ_POSITIONS, READ_TARGETS = "read_rows", "read_positions", "read_targets"
"""Beside the model's inputs, a micro-batch names the places that a language-model head reads, flat over its rows: the
row in the micro-batch, the position among its tokens (its decoder's, where it has decoder tokens), and the token that
should come there."""

HEAD_INPUTS = (READ_ROWS, READ_POSITIONS, READ_TARGETS)


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of one task as token ids; `types` are segment ids where the tokenizer gives them.

    For language-model heads: `decoder` are the decoder's token ids (encoder–decoders), `reads` the positions a head
    reads in each row, `targets` the token that should come at each, `answers` what should be generated. `soft`:
    before which of its tokens a row's soft prompt goes, where that is not the first. `options`: every row's text
    lists its answer among others. `poisoned` of the rows were added by an attacker; they are trained on, and count in
    nothing else.
    """

    task: Task
    ids: list[list[int]]
    types: list[list[int]] | None
    labels: Tensor  # (rows,), int64
    decoder: list[list[int]] | None = None
    reads: list[list[int]] | None = None
    targets: list[list[int]] | None = None
    answers: list[str] | None = None
    soft: list[int] | None = None
    options: bool = False
    poisoned: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def clean_count(self) -> int:
        """How many rows the silo has of its own."""
        return len(self.ids) - self.poisoned

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.ids))

    def concatenated(self, other: TokenizedRows) -> TokenizedRows:
        """These rows, then the other's, of the same task."""

        def both(name: str) -> list[Any] | None:
            mine, others = getattr(self, name), getattr(other, name)
            return None if mine is None or others is None else mine + others

        lists = {name: both(name) for name in ("types", "decoder", "reads", "targets", "answers", "soft")}
        labels, poisoned = torch.cat([self.labels, other.labels]), self.poisoned + other.poisoned
        more: dict[str, Any] = lists | {"options": self.options and other.options, "poisoned": poisoned}
        return TokenizedRows(self.task, self.ids + other.ids, labels=labels, **more)


class RowTokenizer:
    """Turns rows into token ids, once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Token ids of rows (one text or a pair each), truncated to the maximum length."""
        if not rows:
            return TokenizedRows(task, [], None, torch.zeros(0, dtype=torch.int64))
        columns = [list(texts) for texts in zip(*(row.texts for row in rows), strict=True)]
        encoded = self._tokenizer(*columns, truncation=True, max_length=self._max_length)
        types = cast("list[list[int]] | None", encoded.get("token_type_ids"))
        labels = torch.tensor([row.label for row in rows])
        return TokenizedRows(task, cast("list[list[int]]", encoded["input_ids"]), types, labels)


Inputs = dict[str, Tensor]

SOFT_AT = "soft_at"
"""Where each row's prompt goes: before which of its tokens, shape (rows,). Without it, before the first."""
