"""A silo: its rows and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from silotune.core import tensors as part_tools
from silotune.core.tensors import State, Tensors
from silotune.data.tokenized import TokenizedRows


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

    def compact(self) -> SiloState:
        """A copy that takes little more memory than its numbers: a process may keep thousands of them."""
        return self.from_flat(part_tools.compact(self.flat()))


@dataclass(frozen=True)
class AttackedRows:
    """Test rows whose class is not the target, with the trigger put in; labels are their true classes."""

    rows: TokenizedRows
    target: int


@dataclass
class Evaluation:
    """The rows a silo is judged on; `attack`: those that tell how well a backdoor works, where one is looked for."""

    validation: TokenizedRows
    test: TokenizedRows
    attack: AttackedRows | None = None


@dataclass
class Silo:
    """One client. `train` maps task name to rows; `evaluations` maps the reported name to rows.

    `attack_scale`: what a malicious silo multiplies its change by before it leaves.

    `instances`: what its rows are known by and the digest of what that was made with (`evaluation/instances.py`); it
    follows from rows and parts, so it is no state.
    """

    name: str
    train: dict[str, TokenizedRows]
    evaluations: dict[str, Evaluation]
    state: SiloState | None = None
    attack_scale: float = 1.0
    instances: tuple[str, Tensors] | None = None

    @property
    def rows(self) -> int:
        """Training rows of its own, the silo's weight in sample-weighted aggregation."""
        return sum(rows.clean_count for rows in self.train.values())
