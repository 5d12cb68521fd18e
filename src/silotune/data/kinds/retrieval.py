"""Rows whose answer is the passage to be found."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isnan, log
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from silotune.data.kinds.base import Kind, Reading
from silotune.data.readers import Record, read_records, read_text, require_columns
from silotune.data.rows import Row, text_fault
from silotune.data.scores import Counts, Scores
from silotune.data.tasks import RANK_METRICS, Task
from silotune.errors import InputError

QUERY, PASSAGE, NEGATIVE, FURTHER = range(4)
"""What a sequence is in its row. Further passages are only ranked; of these, negatives are also trained on."""

Found = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A row's `target`: its passage, its negatives, and further passages among which it is ranked."""


class Retrieval(Kind):
    """One relevant passage; a row becomes several sequences: the query, the passage, negatives, further passages.

    Outputs are the sequences' vectors, of length 1, shape (sequences, hidden). Targets have the shape (sequences, 2),
    int64: what each sequence is in its row, and a number that equal texts share. Every passage of the rows that are
    scored together is ranked, equal ones once; ties count against the right one.
    """

    name = "retrieval"
    rows = "queries with passages"
    answer = "passage"
    metrics = RANK_METRICS
    constant = "equal vectors"
    baselines = {"bm25": "BM25"}
    least_labels = 0
    gives = "vectors"
    several_answers = True

    @override
    def columns(self, reading: Reading, record: Record) -> Sequence[str]:
        return ["query", "passage"] if "query" in record else [reading.columns[0], reading.label]

    @override
    def read(self, task: Task, reading: Reading, number: int, record: Record) -> Row:
        query, passage = (read_text(reading.path, number, record, column) for column in self.columns(reading, record))
        negatives = read_negatives(record.get("negatives"), f"{reading.row(number)}: 'negatives'")
        return Row((query,), 0, target=(normalize("NFC", passage), negatives, ()))

    @override
    def known(self, task: Task, value: Any) -> tuple[int, Found | None]:
        if value == 0:
            return 0, None
        passage, negatives, further = value
        if not all(isinstance(text, str) for text in (passage, *negatives, *further)):
            raise ValueError(f"passages {value!r:.60}")
        return 0, (passage, tuple(negatives), tuple(further))

    @override
    def label_indices(self, row: Row) -> Sequence[int]:
        return ()

    @override
    def text(self, task: Task, row: Row) -> str:
        return row.target[0] if isinstance(row.target, tuple) else ""

    @override
    def targets(self, task: Task, rows: Sequence[Row]) -> Tensor:
        marks = [(role, number_of_text(text)) for row in rows for role, text in sequences_of(row)]
        return torch.tensor(marks, dtype=torch.int64).reshape(-1, 2)

    @override
    def scores(self, task: Task, outputs: Tensor, targets: Tensor, drawn: Counts | None = None) -> Mapping[str, Counts]:
        return rank_scores(ranks_of(outputs, targets), drawn)

    @override
    def constant_outputs(self, task: Task, targets: Tensor) -> Tensor:
        return torch.ones(len(targets), 1)

    @override
    def written(self, task: Task, outputs: Tensor, targets: Tensor) -> dict[str, list[Any]]:
        """Return the number of each row's passage, and its rank."""
        own = targets[targets[:, 0] == PASSAGE, 1].tolist()
        return {"label": [*map(str, own)], "predicted": [*map(str, ranks_of(outputs, targets))]}

    @override
    def resampled(self, task: Task, metric: str, columns: Mapping[str, Sequence[Any]]) -> Callable[[Counts], Counts]:
        ranks = np.array([*map(int, columns["predicted"])])
        return lambda drawn: rank_scores(ranks, drawn)[metric]

    @override
    def drawn_row(self, task: Task, texts: tuple[str, ...], draw: float) -> Row:
        return Row(texts[:1], 0, target=(texts[0][::-1], (texts[0][1::2],), ()))

    @override
    def own_baselines(self, task: Task, train: Sequence[Row], test: Sequence[Row]) -> Scores:
        """Rank by the words that a query and a passage share (BM25), without training."""
        sequences = [each for row in test for each in sequences_of(row)]
        scores = bm25([text for role, text in sequences if role == QUERY], distinct(sequences))
        ranks = ranks_among(torch.from_numpy(scores), self.targets(task, test))
        return {"bm25": float(rank_scores(ranks)[task.metric][0])}


def read_negatives(cell: object, where: str) -> tuple[str, ...]:
    """Return the negatives of a cell: a text, a list of texts, or such a list as JSON; none where it is empty."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise InputError(f"{where}: not JSON ({error})") from error
    empty = cell in (None, "") or (isinstance(cell, float) and isnan(cell))
    texts = [] if empty else cell if isinstance(cell, list) else [cell]
    for text in texts:
        if not isinstance(text, str) or (fault := text_fault(text)):
            raise InputError(f"{where}: a passage {fault if isinstance(text, str) else f'is no text: {text!r:.60}'}")
    return tuple(normalize("NFC", str(text)) for text in texts)


def read_passages(path: Path, encoding: str = "utf-8") -> tuple[str, ...]:
    """Return the distinct passages of a file's column `passage`."""
    records = read_records(path, encoding)
    require_columns(path, records[0], ["passage"])
    texts = (read_text(path, number, record, "passage") for number, record in enumerate(records, start=1))
    return tuple(dict.fromkeys(normalize("NFC", text) for text in texts))


def ranked_among(rows: Sequence[Row], passages: Sequence[str]) -> list[Row]:
    """Return the rows with further passages, each of which one row holds for all."""
    number = len(rows)
    return [
        replace(row, target=(*row.target[:2], tuple(passages[place::number]))) if isinstance(row.target, tuple) else row
        for place, row in enumerate(rows)
    ]


def sequences_of(row: Row) -> list[tuple[int, str]]:
    """Return a row's sequences, with what each is; a text that is to be embedded is one alone."""
    if not isinstance(row.target, tuple):
        return [(QUERY, row.texts[0])]
    passage, negatives, further = row.target
    marked = [(NEGATIVE, text) for text in negatives] + [(FURTHER, text) for text in further]
    return [(QUERY, row.texts[0]), (PASSAGE, passage), *marked]


def distinct(sequences: Sequence[tuple[int, str]]) -> list[str]:
    """Return the passages among sequences in their order, each once."""
    return list(dict.fromkeys(text for role, text in sequences if role != QUERY))


def number_of_text(text: str) -> int:
    """Return a number of 64 bits that equal texts share, in whatever set of rows they stand."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def places_of(targets: Tensor) -> dict[int, int]:
    """Return the number of each distinct passage, and the first sequence that it is."""
    places: dict[int, int] = {}
    for place, (role, number) in enumerate(targets.tolist()):
        if role != QUERY:
            places.setdefault(number, place)
    return places


def ranks_of(vectors: Tensor, targets: Tensor) -> Counts:
    """Return each row's rank of its passage by the cosine of its vector with the query's, shape (rows,)."""
    passages = vectors[list(places_of(targets).values())].double()
    return ranks_among(vectors[targets[:, 0] == QUERY].double() @ passages.T, targets)


def ranks_among(scores: Tensor, targets: Tensor) -> Counts:
    """Return each row's rank of its passage by scores, shape (queries, distinct passages): how many are not below."""
    columns = {number: column for column, number in enumerate(places_of(targets))}
    own = torch.tensor([columns[number] for role, number in targets.tolist() if role == PASSAGE], dtype=torch.int64)
    ranks: Counts = (scores >= scores.gather(1, own[:, None])).sum(1).numpy()
    return ranks


def rank_scores(ranks: Counts, drawn: Counts | None = None) -> dict[str, Counts]:
    """Score the ranks of the one right passage of each row, in percent; metric → scores, shape (resamples,)."""
    drawn = np.ones((1, len(ranks))) if drawn is None else drawn
    by_row = {
        "ndcg10": np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0),
        "mrr": 1 / ranks,
        "recall1": ranks <= 1,
        "recall10": ranks <= 10,
    }
    return {name: 100 * (drawn @ values) / drawn.sum(1) for name, values in by_row.items()}


def bm25(queries: Sequence[str], passages: Sequence[str], k1: float = 1.5, b: float = 0.75) -> Counts:
    """Score passages for queries, shape (queries, passages), by Okapi BM25 (Robertson and Zaragoza 2009), Lucene's idf.

    Words are runs of letters and digits, in lower case, without stemming and stop words.
    """
    counts = [Counter(re.findall(r"\w+", text.lower())) for text in passages]
    lengths = np.array([sum(own.values()) for own in counts], dtype=float)
    scale = k1 * (1 - b + b * lengths / max(lengths.mean(), 1))
    weights: dict[str, Counts] = {}
    for word in {word for text in queries for word in re.findall(r"\w+", text.lower())}:
        often = np.array([own[word] for own in counts], dtype=float)
        having = (often > 0).sum()
        weights[word] = log(1 + (len(counts) - having + 0.5) / (having + 0.5)) * often / (often + scale)
    scores = [sum((weights[word] for word in re.findall(r"\w+", text.lower())), 0 * lengths) for text in queries]
    return np.stack(scores)
