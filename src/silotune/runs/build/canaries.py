"""Make canaries: rows of random words, whose presence in the training rows a fair coin decides.

An audit guesses the coins from a finished model. Each right guess more than chance tells something of the model's
privacy (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one training run").
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from silotune.communication.privacy.noise_stream import NoiseStream
from silotune.config import Config
from silotune.data.rows import Row, SiloData
from silotune.data.tasks import Task

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_WORDS, _LENGTH = 6, 5


@dataclass(frozen=True)
class Canaries:
    """A silo's canaries.

    Args:
        rows: one row each.
        present: the coins: whether the silo trains on the row.
    """

    rows: Sequence[Row]
    present: Sequence[bool]

    @property
    def trained(self) -> list[Row]:
        """The rows that the silo trains on."""
        return [row for row, present in zip(self.rows, self.present, strict=True) if present]


def canaries_of(config: Config, data: SiloData, secret: bytes | None = None) -> Canaries:
    """Return the canaries of a silo in a run; none where `audit.canaries` is 0.

    Args:
        config: the run's configuration.
        data: the silo's rows.
        secret: the silo's own secret; None: canaries follow from the seed.
    """
    key = f"canaries {config.seed}".encode() if secret is None else secret
    return make_canaries(data.task, len(data.splits.train[0].texts), config.audit.canaries, data.name, key)


def make_canaries(task: Task, texts: int, count: int, silo: str, secret: bytes) -> Canaries:
    """Draw a silo's canaries and their coins, the same for the same secret.

    Args:
        task: the silo's task.
        texts: how many texts a row has.
        count: number of canaries.
        silo: the silo's name.
        secret: the silo's secret, or in a simulation bytes that follow from its seed.
    """
    stream = NoiseStream(hmac.digest(secret, f"canaries\x1f{silo}\x1f{count}".encode(), "sha256"))
    rows = []
    for number in range(count):
        words = [_text(stream, f"{number}/{place}") for place in range(texts)]
        draw = float(stream.uniform("label", str(number), (1,)))
        row = Row(tuple(words), 0, unit=f"canary {number}")
        if task.kind == "generation":
            row = Row((words[0], ""), 0, _text(stream, f"{number}/answer"), unit=row.unit)
        elif task.kind == "regression":
            row = Row(row.texts, 0, target=draw, unit=row.unit)
        elif task.kind == "multilabel":
            row = Row(row.texts, 0, target=(int(draw * len(task.labels)),), unit=row.unit)
        else:
            row = Row(row.texts, int(draw * len(task.labels)), unit=row.unit)
        rows.append(row)
    return Canaries(rows, (stream.uniform("coins", "", (count,)) < 0.5).tolist())


def _text(stream: NoiseStream, name: str) -> str:
    letters = (stream.uniform("letters", name, (_WORDS, _LENGTH)) * len(_LETTERS)).long().tolist()
    return " ".join("".join(_LETTERS[letter] for letter in word) for word in letters)
