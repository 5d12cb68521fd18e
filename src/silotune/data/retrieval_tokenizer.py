"""Tokenize rows of queries and passages, a sequence for each text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from silotune.data.kinds.retrieval import sequences_of
from silotune.data.rows import Row
from silotune.data.targets import target_tensor
from silotune.data.tasks import Task
from silotune.data.tokenized import RowTokenizer, TokenizedRows
from silotune.errors import InputError


class RetrievalTokenizer:
    """Tokenizes rows as their query, their passage and their negatives, each cut at the maximum length.

    With `negatives`, rows have so many: the first ones. With `own`, each needs one, and all have the same number: fewer
    are filled up with the row's own passage, which the loss never takes for a negative.
    """

    def __init__(self, tokenize: RowTokenizer, negatives: int | None, own: bool) -> None:
        self._tokenize, self._negatives, self._own = tokenize, negatives, own

    def __call__(self, task: Task, rows: Sequence[Row]) -> TokenizedRows:
        """Tokenize rows, or texts alone, which are one sequence each."""
        rows = [self._limited(row, number) for number, row in enumerate(rows, start=1)]
        sequences = [sequences_of(row) for row in rows]
        texts = [Row((text,), 0) for own in sequences for _, text in own]
        return replace(self._tokenize(task, texts), labels=target_tensor(task, rows), sizes=[*map(len, sequences)])

    def _limited(self, row: Row, number: int) -> Row:
        if not isinstance(row.target, tuple) or self._negatives is None:
            return row
        passage, negatives, further = cast("tuple[str, tuple[str, ...], tuple[str, ...]]", row.target)
        negatives = negatives[: self._negatives]
        if self._own and not negatives:
            raise InputError(f"row {number} has no negatives; head.in_batch=false needs a column `negatives`, or true")
        filled = (passage,) * (self._negatives - len(negatives)) if self._own else ()
        return replace(row, target=(passage, (*negatives, *filled), further))
