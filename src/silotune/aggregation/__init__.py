"""`make_aggregation`: the configured mean, median, trimmed mean, Krum or plug-in; registers plug-ins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from silotune.aggregation.broadcast_aggregation import BroadcastAggregation, RankAggregation
from silotune.aggregation.exact_products import FedExLoRA, FLoRA, LoRAFAIR
from silotune.aggregation.low_rank import FedSVD, FlexLoRA, HetLoRA
from silotune.aggregation.mean import by_samples, uniform, weighted_mean
from silotune.aggregation.rest_of_world import RestOfWorld, SiloAggregation
from silotune.aggregation.robust import krum, median, most_byzantine, multi_krum, trimmed_mean
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
from silotune.config.section import make_registered
from silotune.core.numeric import ceil_fraction
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.config.coordinator import AggregationConfig


__all__ = ["AGGREGATIONS", "Aggregation", "Update", "by_samples", "change_norm", "clipped", "make_aggregation"]

__all__ += ["BY_ROWS", "BroadcastAggregation", "RankAggregation", "in_name_order", "register_aggregation", "uniform"]

__all__ += ["PartAggregation", "Server", "SiloAggregation", "weighted_mean"]


AGGREGATIONS: dict[str, Callable[..., Any]] = {
    "uniform": uniform,
    "samples": by_samples,
    "median": median,
    **{aggregation.name: aggregation for aggregation in (FlexLoRA, HetLoRA, FedSVD, FedExLoRA, FLoRA, RestOfWorld)},
}
"""The built-in aggregations: functions, or classes as `register_aggregation` takes them.

`make_aggregation` also makes those whose options are keys of the section `aggregation`.
"""

BY_ROWS = frozenset(("samples", "flexlora", "hetlora", "fedsvd", "fedex-lora", "flora", "lora-fair"))
"""The built-in aggregations that weigh silos by their rows; the others weigh all alike."""

registries.AGGREGATIONS.provide(lambda: AGGREGATIONS)


Made = TypeVar("Made", bound=Callable[..., Any])


@overload
def register_aggregation(name: str) -> Callable[[Made], Made]: ...


@overload
def register_aggregation(name: str, aggregation: Made) -> Made: ...


def register_aggregation(name: str, aggregation: Any = None) -> Any:
    """Register an aggregation in this process; with the name alone, return a decorator.

    Other processes of a run find it if an entry point of the group `silotune.aggregations` names it, or if their script
    registers it, too.

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


def make_aggregation(config: AggregationConfig, silos: int) -> Aggregation | BroadcastAggregation:
    """Return the configured aggregation.

    Args:
        config: the section `aggregation`.
        silos: the number of silos in a round.
    """
    if config.name in AGGREGATIONS or config.name not in registries.AGGREGATIONS.reserved:
        made: Aggregation | BroadcastAggregation = make_registered(registries.AGGREGATIONS, config.name, config.options)
        return made
    if config.name == LoRAFAIR.name:
        return LoRAFAIR(config.regularization)
    if config.name == "trimmed-mean":
        return _trimmed_mean(config.trim, silos)
    byzantine = _byzantine(config, silos)
    if config.name == "krum":
        return partial(krum, byzantine=byzantine)
    if config.byzantine is None:
        byzantine = max(byzantine, 1)  # of 3 or 4 silos Krum's bound allows none, and all would be averaged
    if config.keep is not None and config.keep > silos - byzantine:
        raise InputError(
            f"aggregation.keep: {config.keep} updates of a round's {silos}, of which {byzantine} may be malicious "
            f"(aggregation.byzantine); allowed: up to {silos - byzantine}"
        )
    return partial(multi_krum, byzantine=byzantine, keep=config.keep)


def issues_by_silo(name: str) -> bool:
    """Return whether silos receive tensors of their own under an aggregation; False of a name that is not known."""
    kind = registries.AGGREGATIONS.get(name)
    return isinstance(kind, type) and issubclass(kind, SiloAggregation)


def mixing_ranks(aggregation: Aggregation | BroadcastAggregation, ranks: Mapping[str, int]) -> RankAggregation:
    """Return an aggregation as one for silos of several LoRA ranks.

    Args:
        aggregation: the configured one.
        ranks: silo → its rank, at least one of another rank than the run's.
    """
    if isinstance(aggregation, RankAggregation):
        return aggregation
    able = ", ".join(name for name, kind in registries.AGGREGATIONS.items() if _mixes_ranks(kind))
    silo = min(ranks)
    raise InputError(
        f"tuner.ranks: silo {silo!r} has a rank of its own ({ranks[silo]}), and the configured aggregation combines "
        f"equal ranks alone; allowed: aggregation={able}, where the method is defined for it"
    )


def _mixes_ranks(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, RankAggregation)


def _trimmed_mean(trim: float, silos: int) -> Aggregation:
    cut = ceil_fraction(trim, silos)
    if 2 * cut >= silos:
        most = math.floor(1000 * ((silos - 1) // 2) / silos) / 1000
        rule = f"up to {most:g}" if silos > 2 else "another aggregation (it needs 3 silos)"
        raise InputError(
            f"aggregation.trim: {trim:g} cuts {cut} at each end, and only {silos} silos take part in a round; "
            f"allowed: {rule}"
        )
    return partial(trimmed_mean, trim=trim)


def _byzantine(config: AggregationConfig, silos: int) -> int:
    """Return Krum's f: the configured one, or the largest that this number of silos allows."""
    if silos < 3:
        raise InputError(f"aggregation={config.name}: needs at least 3 silos in a round, but only {silos} take part")
    most = most_byzantine(silos)
    if config.byzantine is not None and config.byzantine > most:
        raise InputError(
            f"aggregation.byzantine: {config.byzantine} malicious silos among {silos} in a round are too many for "
            f"{config.name} (it needs n >= 2f + 3); allowed: up to {most}"
        )
    return most if config.byzantine is None else config.byzantine
