"""Bases of aggregations that need more than the updates: the broadcast, LoRA ranks, tensors of each silo's own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from silotune.aggregation.factor_pairs import cut_to_rank, deltas, factor_pairs
from silotune.aggregation.server_optimizer import ServerOptimizer
from silotune.aggregation.update import Update
from silotune.core.tensors import Tensors
from silotune.errors import InputError

RECEIVED_LOSS = "received_loss"
"""The number of a reply that holds the loss of the received model over the silo's training rows, if it is asked for."""

_NOTHING: Tensors = {}

_NO_REPORT: Mapping[str, Any] = {}


class BroadcastAggregation(ABC):
    """An aggregation that also reads the round's broadcast, and may change shared tensors that silos did not send.

    Example, half of the way to the mean:

        class HalfWay(BroadcastAggregation):
            name = "half-way"

            def aggregate(self, updates, before):
                return {name: (mean + before[name]) / 2 for name, mean in uniform(updates).items()}

    `name` is the word of `aggregation=`; `needs_pairs` says that it is defined for shared parts with LoRA's A and B,
    `needs_delta` that it also needs a delta of their target modules (`models/tuners/full.py`); `adopted_whole` that
    its result holds together only as it is, so that no server optimizer may go a part of the way to it;
    `changes_add_up` that a silo's change of one round means the same in the next, so that what a codec left out may be
    sent later; `turns_factors` that the pairs of A and B it issues are others with the same product, in which a silo's
    moments (`train.keep_optimizer`) mean nothing; `reads` names a number of silos' replies, which comes as
    `Update.score`: `RECEIVED_LOSS`, which silos then measure, or a term that the method logs. It leaves a silo only
    where its losses may (`share`), and is refused beside noise and masks, as it has neither.

    `state` holds the tensors that it keeps from round to round, by name, and is in checkpoints; `report` holds what the
    round's event says. Give both new values, do not change them in place.
    """

    name: ClassVar[str]
    needs_pairs: ClassVar[bool] = False
    needs_delta: ClassVar[bool] = False
    adopted_whole: ClassVar[bool] = False
    changes_add_up: ClassVar[bool] = True
    turns_factors: ClassVar[bool] = False
    reads: ClassVar[str] = ""
    state: Tensors = _NOTHING
    report: Mapping[str, Any] = _NO_REPORT

    def accepts(self, score: float) -> bool:
        """Return whether a silo's number is one that can be: by default finite, and not negative."""
        return math.isfinite(score) and score >= 0

    @abstractmethod
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Return the tensors that change, by "part/tensor" name; all others stay as they are.

        Args:
            updates: in silo-name order, at least one; each holds the parts that its round trained.
            before: all shared tensors in the round's broadcast.
        """

    def check(self, shared: Tensors, optimizer: ServerOptimizer, feedback: bool = False) -> None:
        """Refuse shared parts that the aggregation is not defined for, before training.

        With `feedback`, silos add what a codec left out to their next change.
        """
        if self.needs_pairs and not factor_pairs(shared):
            raise InputError(
                f"aggregation={self.name}: the shared parts hold no pairs of LoRA's A and B; "
                "allowed: a method that shares both, with tuner=lora"
            )
        if self.needs_pairs and any(shared[pair.a].dim() > 2 for pair in factor_pairs(shared)):
            raise InputError(
                f"aggregation={self.name}: is defined for matrices, and experts have several; allowed: another "
                "aggregation, or tuner.sites without the feed-forward network"
            )
        missing = [pair for pair in factor_pairs(shared) if pair.module not in deltas(shared)]
        if self.needs_delta and missing:
            raise InputError(
                f"aggregation={self.name}: the shared parts hold no delta of {missing[0].module}; "
                "allowed: method=fedex-lora, flora or fedmomentum, or another one with a Delta"
            )
        if self.adopted_whole and not optimizer.adopts:
            raise InputError(
                f"server.optimizer={optimizer.name}, server.lr={optimizer.lr:g}: aggregation={self.name} makes tensors "
                "that hold together as they are; allowed: none, 1"
            )
        if feedback and not self.changes_add_up:
            raise InputError(
                f"uplink.feedback: aggregation={self.name} issues other tensors than silos have trained, and what a "
                "codec left out of the old ones does not fit the new ones; allowed: false"
            )


class RankAggregation(BroadcastAggregation):
    """An aggregation of updates of several LoRA ranks; the shared parts have the largest one, `tuner.r`."""

    needs_pairs = True

    def to_rank(self, shared: Tensors, rank: int) -> Tensors:
        """Return the shared tensors as silos of a smaller rank receive them: the first rows of A and columns of B."""
        tensors = dict(shared)
        for pair in factor_pairs(shared):
            tensors |= cut_to_rank(pair, shared[pair.a], shared[pair.b], rank)
        return tensors


class SiloAggregation(BroadcastAggregation):
    """An aggregation that issues other tensors to every silo. The coordinator's own are for the log alone."""

    @abstractmethod
    def issued(self, shared: Tensors, silo: str) -> Tensors:
        """Return the shared tensors as a silo receives them; before the first update, as they are."""
