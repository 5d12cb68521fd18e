"""Registers the aggregations, which combine a round's updates; those of one method are in that method's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from silotune.aggregation.broadcast_aggregation import (
    RECEIVED_LOSS,
    BroadcastAggregation,
    RankAggregation,
    SiloAggregation,
)
from silotune.aggregation.fairness import AgnosticMean, QFedAvg
from silotune.aggregation.mean import by_samples, uniform, weighted_mean
from silotune.aggregation.robust import median
from silotune.aggregation.update import (
    Aggregation,
    PartAggregation,
    Server,
    Update,
    change_norm,
    clipped,
    in_name_order,
)
from silotune.config import registries
from silotune.errors import InputError

__all__ = ["AGGREGATIONS", "Aggregation", "Update", "by_samples", "change_norm", "clipped", "uniform"]

__all__ += ["BY_ROWS", "BroadcastAggregation", "RankAggregation", "in_name_order", "register_aggregation"]

__all__ += ["RECEIVED_LOSS", "PartAggregation", "Server", "SiloAggregation", "weighted_mean"]


AGGREGATIONS: dict[str, Callable[..., Any]] = {
    "uniform": uniform,
    "samples": by_samples,
    "median": median,
    "q-fedavg": QFedAvg,
    "afl": AgnosticMean,
}
"""The aggregations of any method; `methods.catalog` adds those of one method."""

BY_ROWS = frozenset(
    (
        *("samples", "flexlora", "hetlora", "fedsvd", "fedex-lora", "flora", "lora-fair", "fedmomentum", "flora-na"),
        *("q-fedavg", "ifca"),
    )
)
"""The built-in aggregations that weigh silos by their rows; the others weigh all alike."""


Made = TypeVar("Made", bound=Callable[..., Any])


@overload
def register_aggregation(name: str) -> Callable[[Made], Made]: ...


@overload
def register_aggregation(name: str, aggregation: Made) -> Made: ...


def register_aggregation(name: str, aggregation: Any = None) -> Any:
    """Register an aggregation in this process; with the name alone, return a decorator.

    Other processes of a run find it if an entry point of the group `silotune.aggregations` names it, or if their script
    also registers it.

    Args:
        name: the name that `aggregation=` chooses it by.
        aggregation: a function of updates (`Aggregation`); or a class of such functions or of `BroadcastAggregation`,
            which is called without arguments or, if it has a pydantic model `Options`, with the options of the section
            `aggregation`.
    """
    return registries.AGGREGATIONS.register_as(name, aggregation)


def _problem(value: object) -> str | None:
    if not callable(value):
        return f"must be a function of updates, or a class of such functions (got {value!r})"
    return registries.options_problem(value)


registries.AGGREGATIONS.problem = _problem


def may_have_state(name: str) -> bool:
    """Return whether an aggregation may keep tensors from round to round; False of a name that is not known."""
    return _is_a(name, BroadcastAggregation)


def score_read_by(name: str) -> str:
    """Return which number of silos' replies an aggregation reads; empty if none, or of a name that is not known."""
    return str(getattr(registries.AGGREGATIONS.get(name), "reads", ""))


def mixing_ranks(aggregation: Aggregation | BroadcastAggregation, ranks: Mapping[str, int]) -> RankAggregation:
    """Return an aggregation as one for silos of several LoRA ranks.

    At least one silo has another rank than the run's.
    """
    if isinstance(aggregation, RankAggregation):
        return aggregation
    able = ", ".join(name for name in registries.AGGREGATIONS if _is_a(name, RankAggregation))
    silo = min(ranks)
    raise InputError(
        f"tuner.ranks: silo {silo!r} has a rank of its own ({ranks[silo]}), and the configured aggregation combines "
        f"equal ranks alone; allowed: aggregation={able}, where the method is defined for it"
    )


def _is_a(name: str, base: type) -> bool:
    kind = registries.AGGREGATIONS.get(name)
    return isinstance(kind, type) and issubclass(kind, base)
