"""The configured aggregation of a run: a mean, a robust one, a method's or a plug-in's."""

from __future__ import annotations

import math
from functools import partial

from silotune.aggregation import Aggregation, BroadcastAggregation
from silotune.aggregation.robust import krum, most_byzantine, multi_krum, trimmed_mean
from silotune.config import registries
from silotune.config.coordinator import AggregationConfig
from silotune.config.section import make_registered
from silotune.core.numeric import ceil_fraction
from silotune.errors import InputError
from silotune.methods.lora_products import CorrectedMeans


def make_aggregation(config: AggregationConfig, silos: int) -> Aggregation | BroadcastAggregation:
    """Return the configured aggregation.

    Args:
        config: the section `aggregation`.
        silos: the number of silos in a round.
    """
    if config.name in registries.AGGREGATIONS:
        made: Aggregation | BroadcastAggregation = make_registered(registries.AGGREGATIONS, config.name, config.options)
        return made
    if config.name == CorrectedMeans.name:
        return CorrectedMeans(config.regularization)
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
