"""A method's local training consists of phases: which parts train, under which views of the model, on which loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.methods.step import Loss, Step
from silotune.models.forward.mixing import Mix, trained_parts

StartingTensors = Callable[[State, State], Tensors]
"""A function of a silo's parts and of the received ones that returns a part's tensors (`Phase.start`)."""


def every(number: int) -> bool:
    """Return True, for a phase of every round (`Phase.rounds`)."""
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
        lr: the phase's learning rate; None: `train.lr`.
        start: target part → source part; the target becomes a copy of the source before the phase. Or a function of the
            silo's parts and of the received ones, which returns the target's tensors. Entries are applied in order.
        skips_first: whether the phase is skipped in a silo's first participation, in which `previous` parts are the
            received ones, so that without dropout its gradient is zero.
        also_first: whether a silo's first participation has the phase whatever the round, for silos that join late.
        steps_per_batch: optimizer steps on each batch, one after the other (pFedMe's K).
        turns: groups of trained parts; each step changes one group, in turn (LA-LoRA). Empty: every step changes all.
        then: part → function of the silo's parts that returns its new tensors; called without gradient when a batch's
            steps are taken. A projection (APFL's α in [0, 1]), or a step that is no gradient step (pFedMe's w).
        gathers: part → function of a batch's `Step` that returns the part's new tensors, for a phase that trains
            nothing: it passes over the silo's rows without gradient and dropout (see `gather`).
        same_at_start: anchor's view → view. In the phase's first step the silo's parts are those received; the anchor's
            view is then taken from the other, without gradient, equal to the bit. A loss with a gradient of 0 for equal
            views is then exactly stationary; Adam would otherwise make whole steps of the rounding.

    Example, a private adapter that is trained beside the frozen shared one, from round 2 on:

        Phase("own", trains=("private",), views={"both": {"global": 0.5, "private": 0.5}}, loss=self.loss, from_round=2)
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
    lr: float | None = None
    start: Mapping[str, str | StartingTensors] = field(default_factory=dict)
    steps_per_batch: int = 1
    turns: tuple[tuple[str, ...], ...] = ()
    then: Mapping[str, Callable[[State], Tensors]] = field(default_factory=dict)
    gathers: Mapping[str, Callable[[Step], Tensors]] = field(default_factory=dict)
    skips_first: bool = False
    also_first: bool = False
    same_at_start: Mapping[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> tuple[str, ...]:
        """The parts that the phase changes: by training, at its start, or after a batch."""
        return tuple(dict.fromkeys((*self.trains, *self.start, *self.then, *self.gathers)))

    @property
    def copied(self) -> dict[str, str]:
        """The source of each part that starts the phase as a copy of another one: target → source."""
        return {target: source for target, source in self.start.items() if isinstance(source, str)}

    @property
    def by_row(self) -> bool:
        """Whether the loss is marked by `mean_over_rows`."""
        return bool(getattr(self.loss, "mean_over_rows", False))

    @property
    def renews_mixes(self) -> bool:
        """Whether a step replaces tensors in the views' mixes, because of learned weights or `then`."""
        learned = any(callable(weight) for mix in self.views.values() for weight in mix.values())
        return learned or not {*self.then} <= {*self.trains}

    def runs_in(self, number: int) -> bool:
        """Return whether the local round of this number has the phase."""
        return self.when == "round" and self.from_round <= number and self.rounds(number)

    def resting(self, step: int) -> set[str]:
        """Return the trained parts that a step of the phase, counted from 0, does not change (`turns`)."""
        return {*self.trains} - {*self.turns[step % len(self.turns)]} if self.turns else set()

    @property
    def views_with_gradient(self) -> int:
        """The number of different views that need a gradient: those with trained parts or learned weights."""
        trained = (
            mix for mix in self.views.values() if trained_parts(mix, self.trains) or any(map(callable, mix.values()))
        )
        return len({frozenset(mix.items()) for mix in trained})


def copies(
    name: str,
    start: Mapping[str, str | StartingTensors],
    rounds: Callable[[int], bool] = every,
    also_first: bool = False,
) -> Phase:
    """Return a phase that trains nothing: every target part becomes a copy of its source, or is set by a function."""
    return Phase(name, (), {}, _no_loss, start=start, rounds=rounds, also_first=also_first)


def gather(
    name: str,
    views: Mapping[str, Mix],
    gathers: Mapping[str, Callable[[Step], Tensors]],
    start: Mapping[str, str | StartingTensors],
) -> Phase:
    """Return a phase that trains nothing and passes once over the silo's rows, to compute parts from their views.

    `gathers` maps a part to a function of a batch's `Step` that returns its new tensors, e.g. a sum so far; `start`
    makes its tensors before the first batch (see `Phase`).
    """
    return Phase(name, (), views, _no_loss, epochs=1, start=start, gathers=gathers)


def _no_loss(step: Step) -> Tensor:
    return torch.zeros(())
