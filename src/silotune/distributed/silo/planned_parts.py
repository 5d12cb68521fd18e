"""`PlannedParts`: the shapes of a run's parts, made without data: what a silo judges before it allocates them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensorMode

from silotune.core.tensors import State, flatten
from silotune.errors import InputError
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name → shape."""


@dataclass(frozen=True)
class PlannedParts:
    """A silo's parts before round 1, as PyTorch's fake tensors, which have shapes and no storage.

    Args:
        shared: the parts that leave.
        private: the parts that stay, and those that the seed fixes.
    """

    shared: State
    private: State

    @classmethod
    def of(cls, context: TrainingContext, silo: Silo) -> PlannedParts:
        """Have the method's own parts make their initial values of fake tensors.

        Args:
            context: backbone and method.
            silo: whose tasks the parts are for.
        """
        tasks = [rows.task for rows in silo.train.values()]
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                stays = context.initial.private(silo.name, tasks) | context.initial.fixed()
                return cls(context.initial.at_rank(context.initial.shared([silo]), silo.name), stays)
        except RuntimeError as error:  # what fake tensors cannot do: read a number, hand data to NumPy
            names = ", ".join(sorted({part.module.name for part in context.parts.values()}))
            raise InputError(
                f"method={context.method.name}: the size of its parts ({names}) is not known before they are made: "
                f"their initial values depend on data ({type(error).__name__})"
            ) from error

    @property
    def private_numbers(self) -> int:
        """How many numbers stay in the silo."""
        return sum(math.prod(tensor.shape) for tensor in flatten(self.private).values())
