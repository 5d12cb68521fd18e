"""Parts of a method: named sets of tensors with a scope and a tuner or head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch

from silotune.core.tensors import Tensors

if TYPE_CHECKING:
    from silotune.data.tasks import Task
    from silotune.models.backbone.backbone import Backbone


class Scope(StrEnum):
    """Where a part lives."""

    SHARED = "shared"  # sent to the coordinator and aggregated
    PRIVATE = "private"  # never leaves the silo


class Module(Protocol):
    """What fills a part: a tuner, a head, a projection."""

    @property
    def name(self) -> str:
        """The module's kind, as `silotune parts` prints it."""

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """The part's tensors before training, float32."""


@dataclass(frozen=True)
class Part:
    """One part of a method: what it is, its scope, and where its first values come from.

    `start` names another part whose initial values this one copies (so that, say, a local adapter begins as the
    global one). Shared parts start equal on all silos; private ones draw from their silo's own generator.
    """

    module: Module
    scope: Scope
    start: str | None = None


@dataclass(frozen=True)
class Scalar:
    """A part that is one number (`value`, shape ()): a learned weight of a mix."""

    start: float
    name: str = "scalar"

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Module.init`."""
        return {"value": torch.tensor(self.start)}


def shared(module: Module) -> Part:
    """A part that is sent to the coordinator and aggregated."""
    return Part(module, Scope.SHARED)


def private(module: Module) -> Part:
    """A part that never leaves the silo."""
    return Part(module, Scope.PRIVATE)


def names_with(parts: Mapping[str, Part], scope: Scope) -> list[str]:
    """The names of the parts that have this scope."""
    return [name for name, part in parts.items() if part.scope is scope]
