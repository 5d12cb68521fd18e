"""What a method is: parts, phases of local training, a loss over views, and the mix at prediction.

A method file reads like its paper's algorithm box; everything else (sampling, messages, checkpoints, engines) is the
same for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor

from silotune.config.section import Section
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.methods.instance_weighting import InstanceWeighting
from silotune.methods.parts import Part, Scope
from silotune.models.forward.mixing import Mix
from silotune.models.forward.mixing import frozen as frozen
from silotune.models.forward.mixing import previous as previous
from silotune.models.forward.mixing import received as received
from silotune.models.forward.views import View
from silotune.models.heads import Head
from silotune.models.tuners.base import Tuner

# The usual names of parts.
GLOBAL = "global"

PRIVATE = "private"

HEAD = "head"


PREVIOUS = "previous"
"""Where a silo's memory keeps the parts that its method remembers."""


def previous_tensors(memory: Tensors, part: str) -> Tensors:
    """A remembered part in a silo's memory; empty before its first participation."""
    prefix = f"{PREVIOUS}/{part}/"
    return {key.removeprefix(prefix): tensor for key, tensor in memory.items() if key.startswith(prefix)}


def proximal(tensors: Tensors, anchor: Tensors) -> Tensor:
    """`‖w − anchor‖²` over all tensors of a part (scalar)."""
    return torch.stack([(tensor - anchor[name]).square().sum() for name, tensor in tensors.items()]).sum()


_WORK = ("loss", "steps", "rows", "real_tokens", "padded_tokens", "seconds")

LOGGED = frozenset(("event", "round", "silo", "note", "bytes_up", "bytes_down", *_WORK))
"""What the events of a silo's round say of their own; no term of a loss has such a name."""


@dataclass(frozen=True)
class Setting:
    """What an experiment's setting fixes for any method: the tuner, the head and the head's scope."""

    tuner: Tuner
    head: Head
    head_scope: Scope = Scope.PRIVATE


@dataclass
class Step:
    """What a loss sees of one batch: its views, and the silo's parts, anchors and memory.

    `terms` collects what the loss wants logged. A loss may draw with torch's own generator: the stream is the
    step's.
    """

    batch: Batch
    views: dict[str, View]
    state: State
    received: State
    memory: Tensors
    modules: Mapping[str, Part]
    terms: dict[str, Tensor] = field(default_factory=dict)

    def logits(self, view: str, head: str = HEAD) -> Tensor:
        """A head's logits over a view, shape (rows, classes)."""
        return self._head(head).logits(self.state.get(head, {}), self.views[view], self.batch.task)

    def cross_entropy(self, view: str, head: str = HEAD) -> Tensor:
        """Mean cross-entropy of a head over a view (scalar): of the batch's labels, or of its responses' tokens."""
        return self._head(head).cross_entropy(self.state.get(head, {}), self.views[view], self.batch)

    def previous(self, part: str) -> Tensors:
        """A part at the end of the silo's last participation; in its first one, as received."""
        return previous_tensors(self.memory, part) or self.received[part]

    def _head(self, name: str) -> Head:
        module = self.modules[name].module
        assert isinstance(module, Head), f"part {name!r} is no head"
        return module

    def log(self, **terms: Tensor) -> None:
        """Record terms of the loss for the event log.

        Raises:
            ValueError: a name that the log uses itself.
        """
        taken = sorted(terms.keys() & LOGGED)
        if taken:
            raise ValueError(f"a loss term may not be called {taken[0]!r}: the event log uses that name itself")
        self.terms.update({name: term.detach() for name, term in terms.items()})


@dataclass(frozen=True)
class Phase:
    """One stretch of local training.

    Args:
        name: in logs and in the derivation of batches.
        trains: the parts that take gradient steps; all others are constant.
        views: name → mix, computed for every batch before the loss.
        loss: the scalar to minimize.
        when: in every round, or once at the end.
        who: at the end: only silos that were ever sampled, or all.
        epochs: passes over the silo's rows; None: the setting's `train.epochs` or `train.steps`.
        start: part → part: before the phase, the first is set to a copy of the second.
        skips_first: a silo's first participation passes it over (there is no `previous` yet).
    """

    name: str
    trains: tuple[str, ...]
    views: Mapping[str, Mix]
    loss: Callable[[Step], Tensor]
    when: Literal["round", "end"] = "round"
    who: Literal["sampled", "all"] = "sampled"
    epochs: int | None = None
    start: Mapping[str, str] = field(default_factory=dict)
    skips_first: bool = False


@dataclass(frozen=True)
class PredictionMix:
    """How a silo's model predicts: the mix, and the head over it.

    `weighting`: weights are found anew for each text; `mix` is then what they are where nobody looks at texts (what a
    forward costs).
    """

    mix: Mix
    head: str = HEAD
    weighting: InstanceWeighting | None = None

    def mixed(self, alpha: Tensor | None = None) -> Mix:
        """The mix of texts whose weights, shape (rows,), are known; the fixed one where there are none."""
        return self.mix if self.weighting is None or alpha is None else self.weighting.mix(alpha)


class MethodOptions(Section):
    """A method's own options (`method.*`); each method extends it."""

    model_config = ConfigDict(frozen=True)


class Method(ABC):
    """One paper's algorithm."""

    name: ClassVar[str]
    paper: ClassVar[str]
    Options: ClassVar[type[MethodOptions]] = MethodOptions
    defaults: ClassVar[Mapping[str, object]] = {}
    """Settings the method brings along (`{"tuner": "lora"}`), below what a user says."""
    tuners: ClassVar[tuple[str, ...] | None] = None
    """The tuners that the method is defined for; None: all."""
    centralized: ClassVar[bool] = False
    """Whether all silos' rows are put into one training silo."""
    unlabelled: ClassVar[bool] = False
    """Whether silos' training rows come without labels."""

    def __init__(self, setting: Setting, options: MethodOptions | None = None) -> None:
        self.setting = setting
        self.options = options or self.Options()

    @abstractmethod
    def parts(self) -> dict[str, Part]:
        """The parts, in the order in which they are printed and drawn."""

    @abstractmethod
    def phases(self) -> list[Phase]:
        """The phases of local training, in order."""

    def server_phases(self) -> list[Phase]:
        """What the coordinator trains after aggregation, on its own labeled rows; shared parts only."""
        return []

    @abstractmethod
    def prediction(self) -> PredictionMix:
        """The personalized model of a silo."""

    @property
    def remembers(self) -> tuple[str, ...]:
        """The parts kept as `previous(...)` anchors from one participation to the next."""
        return ()

    def head(self) -> Part:
        """The setting's head as a part, with the setting's scope."""
        return Part(self.setting.head, self.setting.head_scope)
