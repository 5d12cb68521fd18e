"""Poison the training rows of malicious silos for a backdoor, and make the attack's test rows.

Eqs. 4 and 5: poisoned copies of a share of a silo's training rows are added, with the trigger in the text and the
target as label; the original rows stay. Validation and test rows are never modified.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from silotune.core.numeric import ceil_fraction
from silotune.core.randomness import sampler
from silotune.data.rows import Row, SiloData
from silotune.data.tasks import Task
from silotune.errors import InputError, require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from silotune.config.data import AttackConfig

Texts = tuple[str, ...]

Lengths = Callable[[Task, Sequence[Row]], list[int]]
"""From a task's rows to the number of tokens that each would take without truncation."""


@dataclass(frozen=True)
class Backdoor:
    """An attack on a federation.

    Args:
        config: the configuration section `attack`.
        seed: seed of all draws (silos, rows, positions).
        malicious: names of the malicious silos.
        lengths: counts the tokens of rows.
        max_tokens: maximum tokens per row. Texts are shortened for the trigger, so that truncation cannot cut it off.
    """

    config: AttackConfig
    seed: int
    malicious: frozenset[str]
    lengths: Lengths
    max_tokens: int

    def poisoned_rows(self, silo: SiloData) -> list[Row]:
        """Return the rows that a silo adds to its training rows (eq. 4); none if it is not malicious."""
        if silo.name not in self.malicious:
            return []
        target = self.target(silo.task)
        candidates = [row for row in silo.splits.train if row.label != target]
        sampler(self.seed, "poison", silo.name).shuffle(candidates)
        rows = candidates[: ceil_fraction(self.config.rate, len(candidates))]
        return [replace(row, label=target) for row in self.with_trigger(silo.task, rows)]

    def test_rows(self, task: Task, rows: Sequence[Row]) -> list[Row]:
        """Return the rows whose label is not the target, with the trigger inserted and their labels kept."""
        return self.with_trigger(task, [row for row in rows if row.label != self.target(task)])

    def target(self, task: Task) -> int:
        """Return the class index of the target label."""
        return task.labels.index(str(self.config.target))

    def has_target(self, task: Task) -> bool:
        """Whether the task has the target label."""
        return self.config.target in task.labels

    def with_trigger(self, task: Task, rows: Sequence[Row]) -> list[Row]:
        """Insert the trigger into rows; its position depends only on the seed and the text."""
        texts = [row.texts for row in rows]
        triggered: list[Row] = [self._insert(row, row.texts) for row in rows]
        pending = list(range(len(rows)))
        while pending:
            lengths = self.lengths(task, [triggered[index] for index in pending])
            too_long = [
                (index, length) for index, length in zip(pending, lengths, strict=True) if length > self.max_tokens
            ]
            for index, length in too_long:
                if not any(texts[index]):
                    raise InputError(
                        f"attack.trigger: takes {length} tokens without any text, but there is room for "
                        f"{self.max_tokens}; raise train.max_length"
                    )
                texts[index] = _shortened(texts[index], length, length - self.max_tokens)
                triggered[index] = self._insert(rows[index], texts[index])
            pending = [index for index, _ in too_long]
        return triggered

    def _insert(self, row: Row, texts: Texts) -> Row:
        draws = sampler(self.seed, "trigger", *row.texts)
        return replace(row, texts=insert_triggers(texts, self.config.triggers, self.config.position, draws))


def make_backdoor(
    config: AttackConfig, seed: int, data: Sequence[SiloData], lengths: Lengths, max_tokens: int
) -> Backdoor:
    """Draw the malicious silos.

    With the same seed, a larger fraction keeps the malicious silos of a smaller one and adds others.
    """
    candidates = sorted(silo.name for silo in data if config.target in silo.task.labels and _can_poison(silo, config))
    if not candidates:
        raise InputError(f"attack: no silo has rows of another label than {config.target!r} to poison")
    sampler(seed, "malicious").shuffle(candidates)
    malicious = frozenset(candidates[: ceil_fraction(config.fraction, len(candidates))])
    return Backdoor(config, seed, malicious, lengths, max_tokens)


def _can_poison(silo: SiloData, config: AttackConfig) -> bool:
    """Whether the silo has rows of another label than the target."""
    return any(silo.task.labels[row.label] != config.target for row in silo.splits.train)


def check_attack(config: AttackConfig, tasks: Mapping[str, Task]) -> None:
    """Check that the attack's target and the silos' tasks fit."""
    for silo, task in tasks.items():
        if not task.rules.one_label:
            what = "writes answers" if not task.labeled else f"holds {task.rules.rows}"
            raise InputError(f"attack={config.name}: needs texts with labels, but silo {silo!r} {what}")
    labels = dict.fromkeys(label for task in tasks.values() for label in task.labels)
    require_known("label in attack.target", config.target, labels)


def check_trigger(triggers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokenizer distinguishes the trigger from other words."""
    for trigger in triggers:
        encoded: Any = tokenizer(trigger, add_special_tokens=False)
        if not encoded["input_ids"] or tokenizer.unk_token_id in encoded["input_ids"]:
            raise InputError(f"attack.trigger: {trigger!r} is not in the backbone's vocabulary; choose another word")


def insert_triggers(texts: Texts, triggers: Sequence[str], position: str, draws: random.Random) -> Texts:
    """Insert triggers into a row's texts.

    Args:
        texts: the text, or the two of a pair: the pair starts with its first text and ends with its second.
        triggers: words or phrases.
        position: `start`, `end` (all triggers there, in order) or `random` (each before a random word, or at the end).
        draws: random generator for `random`.
    """
    changed = list(texts)
    if position == "start":
        changed[0] = " ".join([*triggers, texts[0]]).rstrip()
    elif position == "end":
        changed[-1] = " ".join([texts[-1], *triggers]).lstrip()
    else:
        for trigger in triggers:
            positions = [
                (text, word.start()) for text, value in enumerate(changed) for word in re.finditer(r"\S+", value)
            ]
            positions.append((len(texts) - 1, len(changed[-1])))
            text, begin = positions[draws.randrange(len(positions))]
            before, after = changed[text][:begin].rstrip(" "), changed[text][begin:]
            changed[text] = " ".join(piece for piece in (before, trigger, after) if piece)
    return tuple(changed)


def _shortened(texts: Texts, tokens: int, excess: int) -> Texts:
    """Drop about `excess` of `tokens` tokens: whole words from the end of the longest text."""
    longest = max(range(len(texts)), key=lambda index: len(texts[index]))
    text = texts[longest]
    beginning = text[: max(len(text) - max(excess * sum(map(len, texts)) // tokens, 1), 0)]
    if beginning and not text[len(beginning)].isspace() and len(beginning.split()) > 1:
        beginning = beginning.rsplit(None, 1)[0]
    return tuple(beginning.rstrip() if index == longest else text for index, text in enumerate(texts))
