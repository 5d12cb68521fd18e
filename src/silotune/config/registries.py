"""The registries of methods, tuners, heads, aggregations and codecs; the rooms that define these fill them.

The reserved names are those of the first built-in choices. A choice that is added to its room's list is known here too.
"""

from __future__ import annotations

from typing import Any

from silotune.core.registry import Registry

METHODS: Registry[Any] = Registry("method", aliases={"centralized": "centralised"})

TUNERS: Registry[Any] = Registry("tuner")

HEADS: Registry[Any] = Registry("head", reserved=("mlp", "linear", "verbalizer", "lm"), home="silotune.models.heads")

AGGREGATIONS: Registry[Any] = Registry(
    "aggregation",
    reserved=("uniform", "samples", "median", "trimmed-mean", "krum", "multi-krum"),
    home="silotune.communication.aggregation",
)
"""`communication.aggregation.make_aggregation` makes the aggregations whose options are keys of the section."""

CODECS: Registry[Any] = Registry("codec", reserved=("fp16", "int8", "int4"), home="silotune.communication.uplink")
"""`communication.uplink.make_pipeline` makes the codecs whose options are keys of the section."""
