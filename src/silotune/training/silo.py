"""A silo in training: its tokenized rows by task, its state, and the rows it is judged on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from silotune.core import tensors as part_tools
from silotune.core.tensors import State, Tensors
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.methods import Method


@dataclass
class SiloState:
    """A silo's state: its private parts, and its memory (flat names), such as previous parts."""

    private: State
    memory: Tensors = field(default_factory=dict)

    def flat(self) -> Tensors:
        """Return `{"private/part/tensor": …, "memory/name": …}`, as in checkpoints and digests."""
        private = {f"private/{name}": tensor for name, tensor in part_tools.flatten(self.private).items()}
        return private | {f"memory/{name}": tensor for name, tensor in self.memory.items()}

    @classmethod
    def from_flat(cls, tensors: Tensors) -> SiloState:
        """Return the state of which `flat` made these tensors."""
        groups: dict[str, Tensors] = {"private": {}, "memory": {}}
        for name, tensor in tensors.items():
            group, rest = name.split("/", 1)
            groups[group][rest] = tensor
        return cls(part_tools.unflatten(groups["private"]), groups["memory"])

    def compact(self) -> SiloState:
        """Return a copy with little memory overhead: a process may keep thousands of states."""
        return SiloState.from_flat(part_tools.compact(self.flat()))


@dataclass(frozen=True)
class AttackedRows:
    """Test rows of classes other than the target, with the trigger inserted; labels are their true classes."""

    rows: TokenizedRows
    target: int


@dataclass
class EvaluationRows:
    """The rows a silo is judged on.

    Args:
        validation: rows that choose the best round.
        test: rows of the result.
        attack: rows that measure the success of a backdoor, if one is looked for.
        own: how much a test row of each label counts among the silo's own kind of rows, shape (classes,), whether or
            not it does so in `test`; None where no labeled data set is partitioned.
    """

    validation: TokenizedRows
    test: TokenizedRows
    attack: AttackedRows | None = None
    own: Tensor | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the token ids: silos that weigh the same rows differently have equal keys."""
        return id(self.validation.ids), id(self.test.ids)

    def weighted(self, weights: Mapping[str, Sequence[float]], primary: bool) -> EvaluationRows:
        """Return the rows with a silo's own weights of labels by split; with `primary` they count in its scores."""
        validation, test = (torch.tensor(weights[split], dtype=torch.float64) for split in ("validation", "test"))
        if not primary:
            return replace(self, own=test)
        rows = replace(self.validation, shares=validation), replace(self.test, shares=test)
        return EvaluationRows(*rows, self.attack, test)


@dataclass
class Silo:
    """One client of the federation.

    Args:
        name: the silo's name.
        train: task name → training rows.
        evaluations: reported name → rows to judge the silo on.
        state: private parts and memory; None before the first participation.
        attack_scale: the factor by which a malicious silo multiplies its change before it sends it.
        canaries: rows of an audit as token ids, and whether the silo trains on each; it does so after its own rows.
        empty_units: units that have no row; noise on rows counts them like any other.
        instances: a digest of the parts that embedded the silo's rows, and the vectors with their sampling key
            (`evaluation/instance_vectors.py`). They follow from rows and parts, so they are not part of the state.
    """

    name: str
    train: dict[str, TokenizedRows]
    evaluations: dict[str, EvaluationRows]
    state: SiloState | None = None
    attack_scale: float = 1.0
    canaries: tuple[TokenizedRows, list[bool]] | None = None
    empty_units: int = 0
    instances: tuple[str, Tensors] | None = None

    @property
    def rows(self) -> int:
        """The number of its own training rows, or of their units: its weight in sample-weighted aggregation."""
        units = (rows.clean_count if rows.units is None else len({*rows.units}) for rows in self.train.values())
        return sum(units) + self.empty_units


def silos_without_rows(method: Method, tasks: Mapping[str, Task]) -> dict[str, Silo]:
    """Build silos whose rows are elsewhere, from their tasks by name; a centralized method puts them together."""
    silos = {}
    for name, task in tasks.items():
        rows = TokenizedRows(task, [], None, torch.zeros(0, dtype=torch.int64))
        silos[name] = Silo(name, {task.name: rows}, {name: EvaluationRows(rows, rows)})
    return centralized(silos, method.name) if method.centralized else silos


def centralized(silos: Mapping[str, Silo], name: str) -> dict[str, Silo]:
    """Return one training silo of this name with all silos' rows, judged on each silo's rows."""
    train: dict[str, TokenizedRows] = {}
    for silo in sorted(silos.values(), key=lambda silo: silo.name):  # the order in which they were named cannot matter
        for task, rows in silo.train.items():
            train[task] = train[task].concatenated(rows) if task in train else rows
    evaluations = {name: evaluation for silo in silos.values() for name, evaluation in silo.evaluations.items()}
    return {name: Silo(name, train, evaluations, empty_units=sum(silo.empty_units for silo in silos.values()))}
