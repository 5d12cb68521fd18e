"""One silo under attack, in this process: what the coordinator sends it, and the change that it reads back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from silotune.config.uplink import PrivacyConfig
from silotune.core.tensors import State, flatten
from silotune.data.tokenized import TokenizedRows
from silotune.runs.build.builder import build
from silotune.runs.build.plan_row_noise import plan_row_noise
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation
from silotune.training.local_trainer import LocalTrainer
from silotune.training.silo import Silo

SETTING = (
    *("data.tasks=[sentiment]", "method=fedavg", "method.adapters=1", "head=linear", "tuner.r=1"),
    *("train.batch_size=8", "train.optimizer=sgd", "train.lr=0.001", "train.epochs=1", "threads=1"),
)
"""Words of an attacker's run over the demo's sentiment rows: plain SGD with small steps, so that changes add up."""


def private(rounds: int) -> tuple[str, ...]:
    """Return the words of a run of so many rounds under `policy: private` at ε = 1 for each row."""
    return "privacy.unit=row", "privacy.epsilon=1", f"rounds={rounds}"


def demo(seed: int, *words: str) -> Federation:
    """Build a federation of one silo over the demo's sentiment rows and the default backbone."""
    return build(read_config("demo", [*SETTING, *words, f"seed={seed}"]))


@dataclass
class OneSilo:
    """A silo that trains on chosen rows, from chosen shared parts, and forgets each round before the next one.

    Args:
        federation: holds one silo or more, of which the first one is attacked.
        rows: its training rows.
        probe: the same without noise on rows, for true gradients; None: the federation has none.
    """

    federation: Federation
    rows: TokenizedRows
    probe: Federation | None = None

    @classmethod
    def of(cls, federation: Federation, count: int) -> OneSilo:
        """Return a silo with the first `count` of its training rows."""
        first = next(iter(federation.silos.values()))
        (rows,) = first.train.values()
        selection, config = some_rows(rows, range(count)), federation.config
        if config.privacy.unit is None:
            return cls(federation, selection)
        attacked = replace(first, train={selection.task.name: selection})
        key = f"{config.seed}".encode()
        noise, _ = plan_row_noise(config, federation.context, {first.name: attacked}, lambda _: [first.name], key)
        federation.context.row_privacy = noise
        plain = config.model_copy(update={"privacy": PrivacyConfig()})
        return cls(federation, selection, build(plain, federation.backbone))

    def start(self, add: float = 0.0) -> State:
        """Return the shared parts of the run's start, with a number added to each of theirs."""
        shared = self.federation.coordinator.shared
        return {name: {key: tensor + add for key, tensor in tensors.items()} for name, tensors in shared.items()}

    def change(self, shared: State, number: int = 1, rows: Sequence[int] | None = None, empty: int = 0) -> Tensor:
        """Return the change that one local round makes to shared parts, as one vector.

        Args:
            shared: what the coordinator broadcasts.
            number: the round's number, from which the order of rows is drawn.
            rows: train on these rows alone; None: on all.
            empty: units without rows beside them.
        """
        (result,) = LocalTrainer(self.federation.context).rounds([self.silo(rows, empty)], shared, number)
        return vector({name: result.state[name] for name in shared}) - vector(shared)

    def silo(self, rows: Sequence[int] | None = None, empty: int = 0) -> Silo:
        """Return the silo before its first round; arguments as of `change`."""
        own = self.rows if rows is None else some_rows(self.rows, rows)
        return replace(self._silo, train={own.task.name: own}, state=None, empty_units=empty)

    def gradients(self, shared: State, rows: Sequence[int]) -> Tensor:
        """Return the change that each of these rows makes alone, shape (rows, numbers): what attacks look for."""
        plain = replace(self, federation=self.probe or self.federation)
        return torch.stack([plain.change(shared, rows=[row]) for row in rows])

    @property
    def name(self) -> str:
        """The silo's name, from which the order of its rows is drawn."""
        return self._silo.name

    @property
    def _silo(self) -> Silo:
        return next(iter(self.federation.silos.values()))


def some_rows(rows: TokenizedRows, indices: Any) -> TokenizedRows:
    """Return some of a table's rows."""
    indices = list(indices)
    types = None if rows.types is None else [rows.types[index] for index in indices]
    return replace(rows, ids=[rows.ids[index] for index in indices], types=types, labels=rows.labels[indices])


def vector(state: State) -> Tensor:
    """Return all numbers of a state as one vector, in the order of their tensors' names."""
    return torch.cat([tensor.double().reshape(-1) for _, tensor in sorted(flatten(state).items())])
