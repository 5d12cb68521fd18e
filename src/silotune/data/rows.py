"""Rows before tokenization, by split and silo."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from typing import Any
from unicodedata import is_normalized, normalize

from silotune.data.tasks import Task
from silotune.errors import InputError

Turn = tuple[str, ...]
"""A turn of a conversation: its role (system, user, assistant or tool), its content, and its further keys as JSON if it
has any that chat templates read, such as `tool_calls`."""

ASSISTANT = "assistant"

_WRITTEN = ("answer", "rejected", "group", "unit", "said", "tools")
"""Fields of a row that are texts, beside `texts` and `turns`."""


SPLITS = ("train", "validation", "test")

UNREAD = -2
"""Label of a row whose label was not declared, or that does not say whose it is: noise on rows counts it as empty."""


def message_of(turn: Turn) -> dict[str, Any]:
    """Return a turn as chat templates read it."""
    role, content, *more = turn
    return {"role": role, "content": content, **(json.loads(more[0]) if more else {})}


@dataclass(frozen=True)
class Row:
    """One labeled text, text pair, instruction or conversation.

    Args:
        texts: one text or two; for generation the instruction and its input (may be empty).
        label: index into the task's label names; 0 for tasks of other kinds than classification.
        answer: reference text for generation.
        group: value of the column that defines natural silos, if there is one.
        turns: the conversation before the answer, which is then the assistant's next turn; empty for other rows.
            `texts` holds its last turn.
        rejected: the answer that `answer` is preferred to (preference pairs).
        target: the number of a regression, the ascending indices of the labels of a row with several, or the words of
            a text with marked spans (`spans.Word`).
        untrained: the assistant's turns that are only read (`weight: 0`), counted from the end, where the answer is −1.
        unit: value of the column `privacy.unit`, or `evaluation.unit`: whose row it is, if that matters.
        said: the further keys of the answer's turn, as JSON; empty: it has none.
        tools: the tools that the assistant may call, as JSON; empty: there are none.
        remarks: what of the file's row was left out, or read differently from how it stands there; for warnings.
    """

    texts: tuple[str, ...]
    label: int
    answer: str = ""
    group: str = ""
    turns: tuple[Turn, ...] = ()
    rejected: str = ""
    target: float | tuple[Any, ...] | None = None
    untrained: tuple[int, ...] = ()
    unit: str = ""
    said: str = ""
    tools: str = ""
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Write all texts in Unicode's form NFC, whoever read them: most tokenizers tell é from e and an accent."""
        single = {name: getattr(self, name) for name in _WRITTEN}
        written = [*self.texts, *single.values(), *(text for turn in self.turns for text in turn)]
        if all(is_normalized("NFC", text) for text in written):
            return
        values: dict[str, object] = {name: normalize("NFC", text) for name, text in single.items()}
        values["texts"] = tuple(normalize("NFC", text) for text in self.texts)
        values["turns"] = tuple(tuple(normalize("NFC", text) for text in turn) for turn in self.turns)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def conversation(self) -> tuple[Turn, ...]:
        """The turns of the conversation, with the answer's turn at the end."""
        return (*self.turns, (ASSISTANT, self.answer, self.said) if self.said else (ASSISTANT, self.answer))

    @property
    def known(self) -> int | float | tuple[Any, ...]:
        """The row's own label, number or labels, as `label` or `target` holds it."""
        return self.label if self.target is None else self.target


_FIELDS = tuple(each.name for each in fields(Row) if each.name != "remarks")


@dataclass
class Splits:
    """Rows of one data set by split."""

    train: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)

    def all(self) -> list[Row]:
        """Return the rows of all splits."""
        return [*self.train, *self.validation, *self.test]

    def counts(self) -> dict[str, int]:
        """Number of rows per split."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}


@dataclass(frozen=True)
class LabeledSet:
    """A task and its published splits.

    Args:
        task: the task.
        splits: its rows.
        unsplit: whether all rows come from one file (in `splits.train`) that is still to be split.
        passages: among which those of test rows are ranked, too (`kind: retrieval`).
    """

    task: Task
    splits: Splits
    unsplit: bool = False
    passages: tuple[str, ...] = ()


@dataclass
class SiloData:
    """A silo's name and its rows, all of one task.

    `weights` says by held-out split how much a row of each label counts among the silo's own kind (`data/own_rows.py`);
    `judged_by_own`, whether it does so in the silo's scores.
    """

    name: str
    task: Task
    splits: Splits
    weights: dict[str, list[float]] = field(default_factory=dict)
    judged_by_own: bool = False


class RowDigests:
    """Fingerprints of silos' splits; rows that silos share are read once."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}

    def of(self, splits: Splits, split: str) -> str:
        """Return the sha256 of a split's rows in order; the splits must live as long as this object."""
        rows: list[Row] = getattr(splits, split)
        if id(rows) not in self._digests:
            sha = hashlib.sha256()
            for row in rows:
                sha.update(json.dumps([getattr(row, name) for name in _FIELDS]).encode())
            self._digests[id(rows)] = sha.hexdigest()
        return self._digests[id(rows)]


def check_silo(data: SiloData, noised: bool = False) -> SiloData:
    """Check that a silo's data can be learned from, and return it.

    With noise on rows (`noised`), a refusal must not depend on their labels.
    """
    rows = data.splits
    if not rows.train:
        raise InputError(f"silo {data.name!r}: no training rows")
    values = {row.known for row in rows.train}
    if len(values) < 2 and data.task.labeled and not noised:
        only, task = rows.train[0], data.task
        raise InputError(
            f"silo {data.name!r}: only one {task.rules.answer} in its training rows ({known_text(task, only)!r}); at "
            "least 2 are needed"
        )
    if not rows.test:
        raise InputError(f"silo {data.name!r}: no test rows")
    return data


def known_text(task: Task, row: Row) -> str:
    """Return a row's label, number, labels or answer for display."""
    text: str = task.rules.text(task, row)
    return text


def text_fault(text: str) -> str:
    """Describe why a text cannot be tokenized, as the end of an error message; empty if it can."""
    if not text.strip():
        return "is empty"
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half a character (a lone surrogate)"
    if "\0" in text:
        return "holds a NUL character; only text is allowed"
    return ""
