"""A silo: its rows and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from silotune import parts as part_tools
from silotune.data.batching import TokenisedRows
from silotune.parts import State, Tensors


@dataclass
class SiloState:
    """What a silo keeps: its private parts, and other memory (previous parts; flat names)."""

    private: State
    memory: Tensors = field(default_factory=dict)

    def flat(self) -> Tensors:
        """`{"private/part/tensor": …, "memory/name": …}`, as in checkpoints and digests."""
        private = {f"private/{name}": tensor for name, tensor in part_tools.flatten(self.private).items()}
        return private | {f"memory/{name}": tensor for name, tensor in self.memory.items()}

    @classmethod
    def from_flat(cls, tensors: Tensors) -> SiloState:
        """The inverse of `flat`."""
        groups: dict[str, Tensors] = {"private": {}, "memory": {}}
        for name, tensor in tensors.items():
            group, rest = name.split("/", 1)
            groups[group][rest] = tensor
        return cls(part_tools.unflatten(groups["private"]), groups["memory"])


@dataclass
class Evaluation:
    """The rows a silo is judged on."""

    validation: TokenisedRows
    test: TokenisedRows


@dataclass
class Silo:
    """One client. `train` maps task name to rows; `evaluations` maps the reported name to rows."""

    name: str
    train: dict[str, TokenisedRows]
    evaluations: dict[str, Evaluation]
    state: SiloState | None = None

    @property
    def rows(self) -> int:
        """Training rows, the silo's weight in sample-weighted aggregation."""
        return sum(len(rows) for rows in self.train.values())
