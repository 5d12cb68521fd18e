"""Describe a silo's rows before training (labels, lengths, duplicates), and warn of likely mistakes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from silotune.data.chat_template import ChatTemplate
from silotune.data.kinds.regression import number_of
from silotune.data.rows import Row, SiloData, Splits, known_text
from silotune.data.tasks import Task, label_spelling, metric_title
from silotune.data.tokenized import TokenizedRows

SPLITS = ("train", "validation", "test")

_MANY_LABELS = 20
"""From so many labels on, few rows per label make a warning: the labels may be numbers."""

_FEW_ROWS_PER_LABEL = 5

_FEW_TEST_ROWS = 30

_LARGE = 100
"""A regression with a number beyond this makes a warning."""

_LEAK = 0.01
"""The share of held-out rows that may also be training rows without a warning."""

MOST_WARNINGS = 12
"""The most warnings that a run prints."""


def describe_rows(silo: SiloData) -> dict[str, Any]:
    """Describe a silo's rows as JSON values: labels, lengths, duplicates, contradictions.

    Returns:
        `label_rows` (split → label → rows; empty without labels), `numbers` (split → least, mean, greatest and standard
        deviation of a regression's numbers), `characters` (split → median, 95th percentile and
        maximum of a row's texts), `duplicates` (split → rows whose texts an earlier row of the split has), `shared`
        (rows of `validation` and `test` whose texts are in `train`), `contradictions` (training rows whose texts have
        several labels), `alike` (groups of labels that differ in case, space or punctuation only). Texts count as
        equal whatever their case and white space.
    """
    splits: dict[str, list[Row]] = {name: getattr(silo.splits, name) for name in SPLITS}
    keys = {name: [row_key(silo.task, row) for row in rows] for name, rows in splits.items()}
    train_keys, regression = {*keys["train"]}, silo.task.kind == "regression"
    return {
        "label_rows": {name: _label_counts(silo, rows) for name, rows in splits.items()},
        "numbers": {name: number_spread(rows) for name, rows in splits.items()} if regression else {},
        "characters": {name: spread([sum(map(len, _texts(row))) for row in rows]) for name, rows in splits.items()},
        "duplicates": {name: len(of_split) - len({*of_split}) for name, of_split in keys.items()},
        "shared": {name: sum(key in train_keys for key in keys[name]) for name in SPLITS[1:]},
        "contradictions": _contradictions(silo, keys["train"]),
        "alike": alike_labels(silo.task.labels),
    }


def row_key(task: Task, row: Row) -> tuple[str, ...]:
    """Return what duplicates of a row have in common: its texts, and its answer if a text may have several."""
    return (*text_key(row), *([known_text(task, row)] if task.rules.several_answers else []))


def spread(values: Sequence[int]) -> dict[str, int] | None:
    """Return median, 95th percentile and maximum of whole numbers; None without numbers."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "median": ordered[(len(ordered) - 1) // 2],
        "p95": ordered[min(len(ordered) - 1, (95 * len(ordered)) // 100)],
        "maximum": ordered[-1],
    }


def number_spread(rows: Sequence[Row]) -> dict[str, float] | None:
    """Return least, mean, greatest and standard deviation of a regression's numbers; None without rows."""
    numbers = [number_of(row) for row in rows]
    if not numbers:
        return None
    return {
        "least": min(numbers),
        "mean": statistics.fmean(numbers),
        "greatest": max(numbers),
        "deviation": statistics.pstdev(numbers),
    }


def alike_labels(labels: Iterable[str]) -> list[list[str]]:
    """Return groups of labels that differ in spelling only (`label_spelling`), such as `Pos` and `pos`."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(label_spelling(label), []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def row_warnings(silo: SiloData, described: Mapping[str, Any]) -> list[str]:
    """Return warnings about a silo's rows, one sentence each."""
    name, counts = f"silo {silo.name!r}", silo.splits.counts()
    rows = silo.splits.all()
    remarks = Counter(remark for row in rows for remark in row.remarks)
    warnings = [f"{name}: {number} rows: {remark}" for remark, number in remarks.items()]
    warnings += [f"{name}: labels that look like one: {_quoted(group)}" for group in described["alike"]]
    train_labels = described["label_rows"]["train"]
    if len(train_labels) >= _MANY_LABELS and counts["train"] < _FEW_ROWS_PER_LABEL * len(train_labels):
        warnings.append(
            f"{name}: {len(train_labels)} labels for {counts['train']} training rows; are they numbers to be predicted "
            "(kind: regression)?"
        )
    numbers = (described["numbers"] or {}).get("train")
    if numbers and max(abs(numbers["least"]), abs(numbers["greatest"])) > _LARGE:
        warnings.append(
            f"{name}: numbers from {numbers['least']:g} to {numbers['greatest']:g}; the loss is their squared error: "
            "scale them to about 0 to 1, or to 0 to 5 as STS-B's"
        )
    for split in SPLITS[1:]:
        shared, held_out = described["shared"][split], counts[split]
        if held_out and shared > _LEAK * held_out:
            warnings.append(
                f"{name}: {shared} of {held_out} {split} rows ({100 * shared / held_out:.0f} %) are also training rows"
            )
        there = [label for label, number in described["label_rows"][split].items() if number]
        new = [label for label in there if not train_labels.get(label)]
        if new:
            warnings.append(f"{name}: no training row of {_quoted(new)}, which {split} rows have")
    if described["contradictions"]:
        number = described["contradictions"]
        warnings.append(f"{name}: {number} training rows have the texts of a row with another label")
    if counts["test"] < _FEW_TEST_ROWS:
        points = f"; one of them is {100 / max(1, counts['test']):.1f} points of a score"
        warnings.append(f"{name}: {counts['test']} test rows{'' if described['numbers'] else points}")
    return warnings


def token_warnings(silo: SiloData, tokenizer: Any, tokenize: Callable[[Task, list[Row]], TokenizedRows]) -> list[str]:
    """Return warnings about the tokens of a silo's rows: control tokens in texts, two begin tokens, turns left out."""
    name, rows = f"silo {silo.name!r}", silo.splits.all()
    control = {*tokenizer.all_special_tokens, *(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)}
    texts = ["\n".join([*_texts(row), row.answer, row.rejected]) for row in rows]
    counts = {token: sum(token in text for text in texts) for token in sorted(control)}
    warnings = [
        f"{name}: {number} of {len(rows)} rows hold the text {token!r}, which becomes the control token"
        for token, number in counts.items()
        if number
    ]
    first, *rest = tokenize(silo.task, silo.splits.train[:1]).ids[0]
    if rest and first == rest[0] and first in (tokenizer.bos_token_id, tokenizer.cls_token_id):
        begin = tokenizer.convert_ids_to_tokens(first)
        warnings.append(f"{name}: rows begin with two begin tokens, {begin!r}; leave it out of head.template")
    template = getattr(tokenize, "template", None)
    if isinstance(template, ChatTemplate):
        unread = [row for row in rows if row.turns and not template.with_tools(row.tools).writes(row.turns)]
        if unread:
            tools = " (rows have 'tools')" if any(row.tools for row in unread) else ""
            counted = f"in {len(unread)} of {len(rows)} rows"
            warnings.append(f"{name}: {counted} the chat template leaves out a turn, a tool or a part of it{tools}")
    return warnings


def as_one(silos: Sequence[SiloData], central: bool) -> Sequence[SiloData]:
    """Return one silo with all training rows if the silos share one data set (`central`), else the silos as given."""
    if not central:
        return silos
    first = silos[0]
    train = [row for silo in silos for row in silo.splits.train]
    return [SiloData(first.task.name, first.task, Splits(train, first.splits.validation, first.splits.test))]


def warnings_of(
    silos: Sequence[SiloData], central: bool, further: Callable[[SiloData], list[str]] = lambda silo: []
) -> list[str]:
    """Return warnings about all silos' rows: at most `MOST_WARNINGS`, and a line that counts the rest."""
    silos = as_one(silos, central)
    warnings = silos_warnings(silos) + [text for silo in silos for text in further(silo)]
    warnings += [text for silo in silos for text in row_warnings(silo, describe_rows(silo))]
    rest = len(warnings) - MOST_WARNINGS
    more = f"{rest} more about the rows; `silotune data … --show 1` prints all"
    return [*warnings[:MOST_WARNINGS], more] if rest > 0 else warnings


def silos_warnings(silos: Sequence[SiloData]) -> list[str]:
    """Return warnings from comparing silos: unlike metrics, and silos that share no label with the others."""
    metrics = list(dict.fromkeys(silo.task.metric for silo in silos))
    unlike = (
        f"silos have unlike metrics ({', '.join(map(metric_title, metrics))}): there is no common average, and the "
        "best round is that of the highest mean validation score over all of them"
    )
    tasks: dict[str, dict[str, set[str]]] = {}
    for silo in silos:
        present = {label for label, number in _label_counts(silo, silo.splits.train).items() if number}
        if present:
            tasks.setdefault(silo.task.name, {})[silo.name] = present
    return [unlike] * (len(metrics) > 1) + unlike_labels(tasks)


def unlike_labels(tasks: Mapping[str, Mapping[str, set[str]]]) -> list[str]:
    """Warn of silos whose rows share no label with those of all other silos of their task: task → silo → labels."""
    warnings = []
    for task, labels_of in tasks.items():
        alone = [
            name
            for name, own in labels_of.items()
            if not any(own & labels for other, labels in labels_of.items() if other != name)
        ]
        if len(labels_of) == 2:  # of two, each is as alone as the other
            alone = alone[:1]
        for name in alone if len(labels_of) > 1 else ():
            others = _quoted([other for other in labels_of if other != name])
            warnings.append(f"silo {name!r}: shares no label with {others}, though all are of task {task!r}")
    return warnings


def text_key(row: Row) -> tuple[str, ...]:
    """Return a row's texts in small letters with single spaces, to find rows with the same texts."""
    return tuple(" ".join(text.split()).casefold() for text in _texts(row))


def _texts(row: Row) -> list[str]:
    """Return the texts of a row; of a conversation its turns, each with its further keys."""
    return ["".join(turn[1:]) for turn in row.turns] or list(row.texts)


def _label_counts(silo: SiloData, rows: Sequence[Row]) -> dict[str, int]:
    counts = Counter(label for row in rows for label in silo.task.rules.label_indices(row))
    return {label: counts[index] for index, label in enumerate(silo.task.labels)}


def _contradictions(silo: SiloData, keys: Sequence[tuple[str, ...]]) -> int:
    """Count the training rows whose texts have several labels."""
    if not silo.task.labels:
        return 0
    labels: dict[tuple[str, ...], set[object]] = {}
    for key, row in zip(keys, silo.splits.train, strict=True):
        labels.setdefault(key, set()).add(row.known)
    return sum(len(labels[key]) > 1 for key in keys)


def _quoted(labels: Sequence[str]) -> str:
    text = ", ".join(map(repr, labels[:5]))
    return f"{text} and {len(labels) - 5} more" if len(labels) > 5 else text
