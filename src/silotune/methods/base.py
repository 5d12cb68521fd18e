"""The base class of all methods; a subclass in one file reads like its paper's algorithm box.

It declares parts, phases of local training and a prediction. Sampling, messages, checkpoints and engines are the same
for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from silotune.aggregation.update import PartAggregation
from silotune.config.section import Options
from silotune.methods.head_first import head_first
from silotune.methods.instance_weighting import InstanceWeighting
from silotune.methods.parts import HEAD, Part, Scope, names_with
from silotune.methods.phase import Phase
from silotune.methods.step import AT_WORK, LocalTraining, WhichHead
from silotune.models.forward.mixing import Mix
from silotune.models.heads import Head
from silotune.models.tuners.base import Tuner


@dataclass(frozen=True)
class Setting:
    """The tuner, the head and the head's scope, which a configuration chooses for any method."""

    tuner: Tuner
    head: Head
    head_scope: Scope = Scope.PRIVATE


@dataclass(frozen=True)
class PredictionMix:
    """The mix and the head with which a silo's model predicts.

    Args:
        mix: the weights of the parts.
        head: the part that is the head; or a mix of heads, whose tensors are added up.
        weighting: computes weights for each text; `mix` then holds the weights that costs are computed with.
    """

    mix: Mix
    head: WhichHead = HEAD
    weighting: InstanceWeighting | None = None

    def mixed(self, alpha: Tensor | None = None) -> Mix:
        """Return the mix for `alpha` of shape (rows,), or the fixed mix if there is no `alpha` or no `weighting`."""
        return self.mix if self.weighting is None or alpha is None else self.weighting.mix(alpha)


class MethodOptions(Options):
    """Base of a method's options, the keys `method.*`."""

    head_rounds: int = Field(
        default=0,
        ge=0,
        description="first rounds, in which heads alone train and leave, on what the untouched backbone reads; the "
        "method's own rounds follow.",
    )
    head_lr: float | None = Field(default=None, gt=0, description="learning rate of `head_rounds`; unset: `train.lr`.")


class Method(ABC):
    """One paper's algorithm.

    `name` is its id, `paper` the reference that `silotune methods` prints, `Options` its keys `method.*`.

    Example, FedAvg of one adapter:

        class Plain(Method):
            name = "plain"

            def parts(self):
                return {GLOBAL: shared(self.setting.tuner), HEAD: self.head()}

            def phases(self):
                return [Phase("train", trains=(GLOBAL, HEAD), views={"full": {GLOBAL: 1}}, loss=self.loss)]

            def loss(self, step):
                return step.cross_entropy("full")

            def prediction(self):
                return PredictionMix({GLOBAL: 1})
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    Options: ClassVar[type[MethodOptions]] = MethodOptions
    defaults: ClassVar[Mapping[str, object]] = {}
    """Keys that the method sets where the user does not, such as `tuner`."""
    tuners: ClassVar[tuple[str, ...] | None] = None
    """The tuners that the method is defined for; None: all."""
    aggregations: ClassVar[tuple[str, ...] | None] = None
    """The aggregations that the method is defined for; None: all."""
    kinds: ClassVar[tuple[str, ...] | None] = None
    """The kinds of tasks that the method is defined for; None: all."""
    optimizers: ClassVar[tuple[str, ...] | None] = None
    """The optimizers of local training (`train.optimizer`) that the method is defined for; None: all."""
    at_prediction: ClassVar[frozenset[str]] = frozenset()
    """The options that training does not read; a comparison trains once for all their values."""
    centralized: ClassVar[bool] = False
    """Whether one silo trains on the rows of all."""
    labeled_only: ClassVar[bool] = False
    """Whether the one silo of a `centralized` method has the coordinator's labeled rows instead."""
    head_scope: ClassVar[Scope | None] = None
    """The scope of `head()` where the method decides it; None: the setting's."""
    unlabeled: ClassVar[bool] = False
    """Whether silos' training rows have no labels."""

    def __init__(self, setting: Setting, options: MethodOptions | None = None) -> None:
        self.setting = setting
        self.options = options or self.Options()

    @abstractmethod
    def parts(self) -> dict[str, Part]:
        """Return the parts by name, in the order in which they are initialized and printed."""

    @abstractmethod
    def phases(self) -> list[Phase]:
        """Return the method's own phases of local training, in order; callers ask `local_phases`."""

    def local_phases(self) -> list[Phase]:
        """Return the phases of local training of all rounds: with `method.head_rounds` first those of the heads."""
        options = self.options
        if not options.head_rounds:
            return self.phases()
        return head_first(self.phases(), self.parts(), options.head_rounds, options.head_lr)

    def server_phases(self) -> list[Phase]:
        """Return the phases that the coordinator trains on its labeled rows after aggregation; shared parts only."""
        return []

    @abstractmethod
    def prediction(self) -> PredictionMix:
        """Return how a silo's personalized model predicts."""

    def sends(self, number: int | None = None) -> list[str]:
        """Return the names of the parts that leave a silo in a round; None: in any round.

        They are the shared parts that a phase of the round changes. The others are only received.
        """
        phases = [phase for phase in self.local_phases() if phase.when == "round"]
        if number is not None:
            phases = [phase for phase in phases if phase.runs_in(number)]
        changed = {name for phase in phases for name in phase.changes}
        return [name for name in names_with(self.parts(), Scope.SHARED) if name in changed]

    def kinds_of_rounds(self, rounds: int) -> Mapping[int, int]:
        """Return the number of the first round of each kind → how many there are; those of a kind have equal phases."""
        phases, counts = self.local_phases(), Counter[int]()
        first: dict[tuple[bool, ...], int] = {}
        for number in range(1, rounds + 1):
            counts[first.setdefault(tuple(phase.runs_in(number) for phase in phases), number)] += 1
        return counts

    def changes(self) -> set[str]:
        """Return the names of the parts that a phase changes, of a silo or of the coordinator.

        Shared parts that no phase changes are only received, as the aggregation made them.
        """
        return {name for phase in (*self.local_phases(), *self.server_phases()) for name in phase.changes}

    @property
    def train(self) -> LocalTraining:
        """The local training of the silo at work; only for losses and the functions of phases, which run in a round."""
        return AT_WORK.get()

    @property
    def aggregations_of_parts(self) -> dict[str, PartAggregation]:
        """The aggregation of each shared part that has one of its own, by part."""
        parts = self.parts().items()
        return {name: part.aggregation for name, part in parts if part.aggregation and part.scope is Scope.SHARED}

    @property
    def needs_labeled_rows(self) -> bool:
        """Whether something is trained on the coordinator's labeled rows."""
        return self.labeled_only or bool(self.server_phases())

    @property
    def collects_rows(self) -> bool:
        """Whether the silos' training rows are put into one place."""
        return self.centralized and not self.labeled_only

    @property
    def remembers(self) -> tuple[str, ...]:
        """The parts that a silo keeps for `previous(...)` anchors."""
        return ()

    def head(self) -> Part:
        """Return the setting's head as a part with `head_scope`, or else the setting's scope."""
        return Part(self.setting.head, self.head_scope or self.setting.head_scope)
