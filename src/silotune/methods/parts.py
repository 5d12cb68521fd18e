"""A method consists of parts: sets of tensors, made by a module, that are sent to the coordinator or stay in a silo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch

from silotune.aggregation.update import PartAggregation
from silotune.core.tensors import Tensors
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.data.tasks import Task
    from silotune.models.backbone.backbone import Backbone

# Usual names of parts.
GLOBAL, PRIVATE = "global", "private"

HEAD, HEAD_GLOBAL, HEAD_PRIVATE = "head", "head_global", "head_private"


class Scope(StrEnum):
    """Whether a part is sent."""

    SHARED = "shared"  # sent to the coordinator and aggregated
    PRIVATE = "private"  # never leaves the silo
    FIXED = "fixed"  # derived from the seed, the same in all silos; neither trained nor sent


class Module(Protocol):
    """Anything that makes a part's tensors: a tuner, head, table, or other object with `name` and `init`."""

    @property
    def name(self) -> str:
        """The kind of module, as `silotune parts` prints it."""

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Return the part's tensors before training, float32."""


@dataclass(frozen=True)
class Part:
    """One part of a method. Shared parts start equal in all silos, private ones from their silo's own generator.

    Args:
        module: the tuner, group of its tensors, head or other module.
        scope: shared, private or fixed.
        start: another part whose initial values this one copies, e.g. a local adapter that begins as the global one.
        alike: whether a private part begins equal in all silos (a head: in all silos of one task).
        redrawn: whether the coordinator redraws a shared part after every round with updates; the
            aggregation has then put elsewhere what silos learned.
        aggregation: computes a shared part from the round's updates, whatever `aggregation=` says; its result is
            adopted without a step of the server optimizer. None: the part is aggregated as `aggregation=` says.

    Example, an adapter of which the coordinator takes the median, and a number that stays in each silo:

        {"global": shared(tuner, aggregation=median_of_part), "alpha": private(Scalar(0.5))}
    """

    module: Module
    scope: Scope
    start: str | None = None
    redrawn: bool = False
    alike: bool = False
    aggregation: PartAggregation | None = None

    def __post_init__(self) -> None:
        """Refuse a plain string as scope: it would be neither shared nor private."""
        if not isinstance(self.scope, Scope):
            raise InputError(
                f"part of {type(self.module).__name__}: its scope must be Scope.SHARED, Scope.PRIVATE or Scope.FIXED "
                f"(got {self.scope!r}); shared(module), private(module) and fixed(module) make parts"
            )


@dataclass(frozen=True)
class Scalar:
    """A module of one number, the tensor `value` of shape (): a learned weight of a mix."""

    start: float
    name: str = "scalar"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Module.init`."""
        return {"value": torch.tensor(self.start)}


CLASSES, WIDTH = "classes", "width"
"""Lengths in the shapes of a `Table`: the number of a task's labels, and the width of the backbone's states."""


class Table:
    """A module of plain tensors that start at zero. Methods that share one are for silos of one task.

    Args:
        shapes: name → shape, of numbers, `CLASSES` and `WIDTH`, e.g. `Table(prototypes=(CLASSES, WIDTH))`.
    """

    name = "table"

    def __init__(self, **shapes: tuple[int | str, ...]) -> None:
        self._shapes = shapes

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Module.init`."""
        lengths = {CLASSES: max(task.outputs for task in tasks), WIDTH: backbone.hidden_size}
        return {
            name: torch.zeros([lengths[length] if isinstance(length, str) else length for length in shape])
            for name, shape in self._shapes.items()
        }


class ZerosLike:
    """A module with another one's tensors, all zero at first, e.g. a sum of gradients of that one."""

    def __init__(self, module: Module) -> None:
        self._module = module

    @property
    def name(self) -> str:
        """See `Module.name`."""
        return f"zeros like {self._module.name}"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Module.init`."""
        like = self._module.init(backbone, tasks, generator)
        return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def shared(module: Module, redrawn: bool = False, aggregation: PartAggregation | None = None) -> Part:
    """Return a part that is sent to the coordinator and aggregated; `redrawn` and `aggregation`: see `Part`."""
    return Part(module, Scope.SHARED, redrawn=redrawn, aggregation=aggregation)


def private(module: Module, start: str | None = None, alike: bool = False) -> Part:
    """Return a part that never leaves the silo; `start` and `alike`: see `Part`."""
    return Part(module, Scope.PRIVATE, start, alike=alike)


def fixed(module: Module) -> Part:
    """Return a part that every silo derives from the seed, and that nothing changes."""
    return Part(module, Scope.FIXED)


def names_with(parts: Mapping[str, Part], scope: Scope) -> list[str]:
    """Return the names of the parts of this scope."""
    return [name for name, part in parts.items() if part.scope is scope]
