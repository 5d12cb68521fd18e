"""`Method`, base of all methods, and what one declares: `Phase`, `Step` (a loss's arguments), `PredictionMix`.

A method file reads like its paper's algorithm box. Sampling, messages, checkpoints and engines are the same for all
methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from silotune.config.section import Options
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.methods.head_mix import WhichHead, head_tensors, heads_of
from silotune.methods.instance_weighting import InstanceWeighting
from silotune.methods.parts import Part, Scope, names_with
from silotune.models.forward.mixing import Mix, trained_parts
from silotune.models.forward.mixing import frozen as frozen
from silotune.models.forward.mixing import joined as joined
from silotune.models.forward.mixing import previous as previous
from silotune.models.forward.mixing import received as received
from silotune.models.forward.views import View
from silotune.models.heads import PLAIN, Head, LossRecipe
from silotune.models.tuners.base import Tuner

# Usual names of parts.
GLOBAL = "global"

PRIVATE = "private"

HEAD = "head"

HEAD_GLOBAL, HEAD_PRIVATE = "head_global", "head_private"

REFERENCE = "reference"
"""The view of the backbone without any part, for heads that read it (`Head.reads_reference`)."""

PREVIOUS = "previous"
"""Prefix of the tensor names under which a silo's memory keeps the parts in `Method.remembers`."""


def previous_tensors(memory: Tensors, part: str) -> Tensors:
    """Return the tensors of a remembered part; empty before the silo's first participation."""
    prefix = f"{PREVIOUS}/{part}/"
    return {key.removeprefix(prefix): tensor for key, tensor in memory.items() if key.startswith(prefix)}


def proximal(tensors: Tensors, anchor: Tensors) -> Tensor:
    """Return `‖w − anchor‖²` over all tensors of a part, shape (); 0 of a part without tensors."""
    if not tensors:
        return torch.zeros(())
    return torch.stack([(tensor - anchor[name]).square().sum() for name, tensor in tensors.items()]).sum()


_WORK = ("loss", "steps", "skipped_steps", "rows", "real_tokens", "padded_tokens", "seconds")

EVENT_KEYS = frozenset(("event", "time", "round", "silo", "note", "bytes_up", "bytes_down", *_WORK))
"""Keys of the events of a silo's round; a term of a loss cannot have such a name."""


@dataclass(frozen=True)
class Setting:
    """The tuner, the head and the head's scope, which a configuration chooses for any method."""

    tuner: Tuner
    head: Head
    head_scope: Scope = Scope.PRIVATE


@dataclass
class Step:
    """The arguments of a loss: one batch, its views, and the silo's parts, anchors and memory.

    A loss may draw with torch's own generator, which is seeded for each step.

    Args:
        batch: the rows.
        views: name → computed view.
        state: part → tensors, with gradients where the phase trains the part.
        received: part → tensors as this round's message brought them.
        memory: tensors that the silo keeps between participations.
        modules: the method's parts by name.
        terms: terms of the loss for the log, filled by `log`.
        recipe: label smoothing and class weights of training.
        watch: called after every `cross_entropy`, with its arguments.
    """

    batch: Batch
    views: dict[str, View]
    state: State
    received: State
    memory: Tensors
    modules: Mapping[str, Part]
    terms: dict[str, Tensor] = field(default_factory=dict)
    recipe: LossRecipe = PLAIN
    watch: Callable[[Step, str, WhichHead], None] | None = None

    def logits(self, view: str, head: WhichHead = HEAD) -> Tensor:
        """Return a head's logits over a view, shape (rows, classes)."""
        module, tensors = self._head(head)
        return module.logits(tensors, self.views[view], self.batch.task)

    def cross_entropy(self, view: str, head: WhichHead = HEAD) -> Tensor:
        """Return the head's loss, shape (): the mean cross-entropy of labels or of responses' tokens, or DPO's loss."""
        module, tensors = self._head(head)
        if module.reads_reference:
            loss = module.referenced_loss(tensors, self.views[view], self.views[REFERENCE], self.batch)
        else:
            loss = module.training_loss(tensors, self.views[view], self.batch, self.recipe)
        if self.watch is not None:  # after the loss, which computes the view's readings with their graph
            self.watch(self, view, head)
        return loss

    @torch.no_grad()
    def pulls(self, view: str, head: WhichHead = HEAD) -> Tensor:
        """Return how strongly each row pulls at the model in `cross_entropy`; see `Head.pulls`."""
        module, tensors = self._head(head)
        reference = self.views[REFERENCE] if module.reads_reference else None
        return module.pulls(tensors, self.views[view], reference, self.batch, self.recipe)

    def label_counts(self) -> Tensor:
        """Return how many of the silo's rows each label has, shape (classes,); of its batch, where that is alone."""
        labels = self.batch.labels if self.batch.source is None else self.batch.source.labels
        return torch.bincount(labels, minlength=len(self.batch.task.labels))

    def previous(self, part: str) -> Tensors:
        """Return a part as of the end of the silo's last participation; in its first one, as received."""
        return previous_tensors(self.memory, part) or self.received[part]

    def _head(self, head: WhichHead) -> tuple[Head, Tensors]:
        name = heads_of(head)[0]
        module = self.modules[name].module
        assert isinstance(module, Head), f"part {name!r} is no head"
        return module, head_tensors(head, self.state, self.received)

    def log(self, **terms: Tensor) -> None:
        """Record terms of the loss, shape () each, for the event log.

        Raises:
            ValueError: the log itself uses a term's name.
        """
        taken = sorted(terms.keys() & EVENT_KEYS)
        if taken:
            raise ValueError(f"a loss term may not be called {taken[0]!r}: the event log uses that name itself")
        self.terms.update({name: term.detach() for name, term in terms.items()})


Loss = Callable[[Step], Tensor]
"""A phase's loss: the scalar to minimize, shape ()."""


def mean_over_rows(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mark a loss as the mean of what it is on pieces of the batch, each weighted by `Head.loss_units`.

    That holds if it adds nothing but cross-entropies of heads, other means over rows where heads take means over rows
    too, and terms that depend on no row; and if it draws no random numbers. With `train.tokens_at_once` the pieces are
    then trained one after the other, in one pass. An override has to be marked again.
    """
    loss.mean_over_rows = True  # type: ignore[attr-defined]
    return loss


def every(number: int) -> bool:
    """Return True: a phase of every round (`Phase.rounds`)."""
    return True


def odd(number: int) -> bool:
    """Return whether the round's number is odd, as the first one's is (`Phase.rounds`)."""
    return number % 2 == 1


def even(number: int) -> bool:
    """Return whether the round's number is even (`Phase.rounds`)."""
    return number % 2 == 0


@dataclass(frozen=True)
class Phase:
    """One stretch of local training.

    Args:
        name: in logs and in the derivation of batches.
        trains: the parts that take gradient steps; all others are constant. Empty: `start` alone (see `copies`).
        views: name → mix; computed for every batch before the loss.
        loss: the scalar to minimize; see `mean_over_rows`.
        when: in every round, or once after the last round.
        who: for `when="end"`: the silos that were ever sampled, or all.
        from_round: for `when="round"`: the first round that may have the phase.
        rounds: for `when="round"`: whether a round, counted from 1, has the phase; `odd` and `even` are such functions.
        epochs: passes over the silo's rows; None: `train.epochs` or `train.steps`.
        start: target part → source part; the target becomes a copy of the source before the phase.
        skips_first: whether the phase is skipped in a silo's first participation (it has no `previous` parts yet).
        also_first: whether a silo's first participation has the phase whatever the round, for silos that join late.
        steps_per_batch: optimizer steps on each batch, one after the other (pFedMe's K).
        then: part → function of the silo's parts that returns its new tensors; called without gradient when a batch's
            steps are taken. A projection (APFL's α in [0, 1]), or a step that is no gradient step (pFedMe's w).
        same_at_start: anchor's view → view. In the phase's first step the silo's parts are still those received; the
            anchor's view is then the other one without gradient, to the bit. A loss whose terms have a gradient of 0
            for equal views is then exactly stationary there; Adam would make whole steps of the rounding otherwise.
    """

    name: str
    trains: tuple[str, ...]
    views: Mapping[str, Mix]
    loss: Loss
    when: Literal["round", "end"] = "round"
    who: Literal["sampled", "all"] = "sampled"
    from_round: int = 1
    rounds: Callable[[int], bool] = every
    epochs: int | None = None
    start: Mapping[str, str] = field(default_factory=dict)
    steps_per_batch: int = 1
    then: Mapping[str, Callable[[State], Tensors]] = field(default_factory=dict)
    skips_first: bool = False
    also_first: bool = False
    same_at_start: Mapping[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> tuple[str, ...]:
        """The parts that the phase changes: by training, at its start, or after a batch."""
        return tuple(dict.fromkeys((*self.trains, *self.start, *self.then)))

    @property
    def by_row(self) -> bool:
        """Whether the loss is marked by `mean_over_rows`."""
        return bool(getattr(self.loss, "mean_over_rows", False))

    def runs_in(self, number: int) -> bool:
        """Return whether the local round of this number has the phase."""
        return self.when == "round" and self.from_round <= number and self.rounds(number)

    @property
    def views_with_gradient(self) -> int:
        """The most views that have a graph at once: those with trained parts or learned weights, equal ones once."""
        trained = (
            mix for mix in self.views.values() if trained_parts(mix, self.trains) or any(map(callable, mix.values()))
        )
        return len({frozenset(mix.items()) for mix in trained})


def copies(
    name: str, start: Mapping[str, str], rounds: Callable[[int], bool] = every, also_first: bool = False
) -> Phase:
    """Return a phase that trains nothing: every target part becomes a copy of its source (`Phase.start`)."""
    return Phase(name, (), {}, lambda step: torch.zeros(()), start=start, rounds=rounds, also_first=also_first)


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


class Method(ABC):
    """One paper's algorithm.

    `name` is its id, `paper` the reference that `silotune methods` prints, `Options` its keys `method.*`.
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
    centralized: ClassVar[bool] = False
    """Whether one silo trains on the rows of all."""
    labeled_only: ClassVar[bool] = False
    """Whether the one silo of a `centralized` method has the coordinator's labeled rows instead."""
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
        """Return the phases of local training, in order."""

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
        phases = [phase for phase in self.phases() if phase.when == "round"]
        if number is not None:
            phases = [phase for phase in phases if phase.runs_in(number)]
        changed = {name for phase in phases for name in phase.changes}
        return [name for name in names_with(self.parts(), Scope.SHARED) if name in changed]

    def changes(self) -> set[str]:
        """Return the names of the parts that a phase changes, of a silo or of the coordinator.

        Of the shared parts the others only come down, as the aggregation made them.
        """
        return {name for phase in (*self.phases(), *self.server_phases()) for name in phase.changes}

    @property
    def needs_labeled_rows(self) -> bool:
        """Whether something is trained on the coordinator's labeled rows."""
        return self.labeled_only or bool(self.server_phases())

    @property
    def collects_rows(self) -> bool:
        """Whether the silos' training rows are put into one place."""
        return self.centralized and not self.labeled_only

    @property
    def proximal_weight(self) -> float:
        """The weight μ of a term `(μ/2)·‖w − w_received‖²` in a loss of shared parts: each step undoes `lr · μ`."""
        return 0.0

    @property
    def remembers(self) -> tuple[str, ...]:
        """The parts that a silo keeps for `previous(...)` anchors."""
        return ()

    def head(self) -> Part:
        """Return the setting's head as a part with the setting's scope."""
        return Part(self.setting.head, self.setting.head_scope)
