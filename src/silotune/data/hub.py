"""Data sets of the hub other than GLUE, under the names and labels of the folders that `data.path` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from silotune.data.folders import LabelledSet
from silotune.data.tasks import Row, Splits, Task
from silotune.errors import InputError


@dataclass(frozen=True)
class Published:
    """Where a task is on the hub: its id and configuration, the text column, our label names by index, its splits."""

    id: str
    configuration: str | None
    text: str
    labels: tuple[str, ...]
    splits: tuple[str, ...] = ("train", "test")


FEDPROMPT = {
    "imdb": Published("stanfordnlp/imdb", None, "text", ("negative", "positive")),
    "offenseval": Published(
        "cardiffnlp/tweet_eval", "offensive", "text", ("NOT", "OFF"), ("train", "validation", "test")
    ),
    "enron": Published("SetFit/enron_spam", None, "text", ("ham", "spam")),
}
"""FedPrompt's single sentences (section 3.1). Ling-Spam is not there as a set of its own."""


def read_published(name: str, published: Published) -> LabelledSet:
    """One task from the Hugging Face hub through `datasets`; rows without text are left out.

    Raises:
        InputError: if the hub cannot be reached, or the set is not as expected.
    """
    from datasets import load_dataset

    where = "/".join(word for word in (published.id, published.configuration) if word)
    try:
        words = [word for word in (published.id, published.configuration) if word]
        loaded: Any = load_dataset(*words)
        rows = {split: _rows(loaded[split], published) for split in published.splits}
    except Exception as error:  # the hub's client raises many kinds; all mean the same to a user
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"data: cannot load {where} ({reason}); set data.path=FOLDER") from error
    return LabelledSet(Task(name, published.labels), Splits(**rows))


def _rows(split: Any, published: Published) -> list[Row]:
    rows = [Row((text,), int(label)) for text, label in zip(split[published.text], split["label"], strict=True)]
    if not all(0 <= row.label < len(published.labels) for row in rows):
        raise ValueError(f"a label outside 0 to {len(published.labels) - 1}")
    return [row for row in rows if row.texts[0].strip()]
