"""A backdoor in the training rows of malicious silos (FedPrompt, section 2.3), and the rows that measure it.

Eqs. 4 and 5: poisoned copies of a share of a silo's rows are added, with the trigger in the text and the target as the
label; its own rows stay. Validation and test rows are never touched.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from silotune.core.numeric import ceil_fraction
from silotune.core.randomness import sampler
from silotune.data.tasks import Row, SiloData, Task
from silotune.errors import InputError, unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from silotune.config.attack import AttackConfig


Texts = tuple[str, ...]

Lengths = Callable[[Task, Sequence[Row]], list[int]]
"""Rows → how many tokens each takes, were there room for all of it."""


@dataclass(frozen=True)
class Backdoor:
    """An attack on a federation: which silos are malicious, and what rows with the trigger look like.

    Args:
        config: the section `attack`.
        seed: for all draws: of silos, of rows, of places.
        malicious: the malicious silos' names.
        lengths: how many tokens rows take.
        room: how many tokens a row may take. A text is shortened for its trigger: truncation must not cut that off.
    """

    config: AttackConfig
    seed: int
    malicious: frozenset[str]
    lengths: Lengths
    room: int

    def poisoned_rows(self, silo: SiloData) -> list[Row]:
        """What a silo adds to its training rows (eq. 4); nothing if it is not malicious."""
        if silo.name not in self.malicious:
            return []
        target = self.target(silo.task)
        others = [row for row in silo.splits.train if row.label != target]
        sampler(self.seed, "poison", silo.name).shuffle(others)
        chosen = others[: ceil_fraction(self.config.rate, len(others))]
        return [replace(row, label=target) for row in self.with_trigger(silo.task, chosen)]

    def test_rows(self, task: Task, rows: Sequence[Row]) -> list[Row]:
        """The rows whose label is not the target, with the trigger put in; labels as they are."""
        return self.with_trigger(task, [row for row in rows if row.label != self.target(task)])

    def target(self, task: Task) -> int:
        """The class to bring about."""
        return task.labels.index(str(self.config.target))

    def has_target(self, task: Task) -> bool:
        """Whether the task has the target label."""
        return self.config.target in task.labels

    def with_trigger(self, task: Task, rows: Sequence[Row]) -> list[Row]:
        """The rows with the trigger put in. Where it goes depends on the seed and on the text alone.

        Raises:
            InputError: if a row would be too long even without any text of its own.
        """
        texts = [row.texts for row in rows]
        done: list[Row] = [self._insert(row, row.texts) for row in rows]
        left = list(range(len(rows)))
        while left:
            lengths = self.lengths(task, [done[place] for place in left])
            long = [(place, length) for place, length in zip(left, lengths, strict=True) if length > self.room]
            for place, length in long:
                if not any(texts[place]):
                    raise InputError(
                        f"attack.trigger: takes {length} tokens without any text, but there is room for {self.room}; "
                        "raise train.max_length"
                    )
                texts[place] = _shortened(texts[place], length, length - self.room)
                done[place] = self._insert(rows[place], texts[place])
            left = [place for place, _ in long]
        return done

    def _insert(self, row: Row, kept: Texts) -> Row:
        draws = sampler(self.seed, "trigger", *row.texts)
        return replace(row, texts=insert_triggers(kept, self.config.triggers, self.config.position, draws))


def make_backdoor(config: AttackConfig, seed: int, data: Sequence[SiloData], lengths: Lengths, room: int) -> Backdoor:
    """The attack on these silos; for the arguments see `Backdoor`. Drawn silos of a larger fraction include these.

    Raises:
        InputError: if there is nothing to poison.
    """
    concerned = sorted(silo.name for silo in data if config.target in silo.task.labels and _to_poison(silo, config))
    if not concerned:
        raise InputError(f"attack: no silo has rows of another label than {config.target!r} to poison")
    sampler(seed, "malicious").shuffle(concerned)
    malicious = frozenset(concerned[: ceil_fraction(config.fraction, len(concerned))])
    return Backdoor(config, seed, malicious, lengths, room)


def _to_poison(silo: SiloData, config: AttackConfig) -> bool:
    """Whether it has rows of another label than the target; one without could not do what it is there for."""
    return any(silo.task.labels[row.label] != config.target for row in silo.splits.train)


def check_attack(config: AttackConfig, data: Sequence[SiloData]) -> None:
    """Refuse an attack that these silos have no place for.

    Raises:
        InputError: for a target that no silo has, or silos that write answers.
    """
    for silo in data:
        if silo.task.kind != "classification":
            raise InputError(f"attack={config.name}: needs texts with labels, but silo {silo.name!r} writes answers")
    labels = dict.fromkeys(label for silo in data for label in silo.task.labels)
    if config.target not in labels:
        raise unknown("label in attack.target", str(config.target), labels)


def check_trigger(triggers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a trigger that the backbone cannot tell from others.

    Raises:
        InputError: naming it.
    """
    for trigger in triggers:
        found: Any = tokenizer(trigger, add_special_tokens=False)
        if not found["input_ids"] or tokenizer.unk_token_id in found["input_ids"]:
            raise InputError(f"attack.trigger: {trigger!r} is not in the backbone's vocabulary; choose another word")


def insert_triggers(texts: Texts, triggers: Sequence[str], position: str, draws: random.Random) -> Texts:
    """A row's texts with the triggers put in.

    Args:
        texts: the text, or the two of a pair, which count as one row: its start is the first's, its end the second's.
        triggers: words or phrases.
        position: `start`, `end` (all of them there, in turn) or `random` (each before any word, or behind the last).
        draws: for `random`.
    """
    changed = list(texts)
    if position == "start":
        changed[0] = " ".join([*triggers, texts[0]]).rstrip()
    elif position == "end":
        changed[-1] = " ".join([texts[-1], *triggers]).lstrip()
    else:
        for trigger in triggers:
            places = [(text, word.start()) for text, value in enumerate(changed) for word in re.finditer(r"\S+", value)]
            places.append((len(texts) - 1, len(changed[-1])))
            text, begin = places[draws.randrange(len(places))]
            before, behind = changed[text][:begin].rstrip(" "), changed[text][begin:]
            changed[text] = " ".join(piece for piece in (before, trigger, behind) if piece)
    return tuple(changed)


def _shortened(texts: Texts, tokens: int, excess: int) -> Texts:
    """The texts with about `excess` of `tokens` tokens fewer, whole words from the end of the longest."""
    longest = max(range(len(texts)), key=lambda place: len(texts[place]))
    text = texts[longest]
    kept = text[: max(len(text) - max(excess * sum(map(len, texts)) // tokens, 1), 0)]
    if kept and not text[len(kept)].isspace() and len(kept.split()) > 1:
        kept = kept.rsplit(None, 1)[0]
    return tuple(kept.rstrip() if place == longest else text for place, text in enumerate(texts))
