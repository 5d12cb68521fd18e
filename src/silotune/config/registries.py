"""The registries of methods, tuners, heads, aggregations and codecs; the rooms that define these fill them."""

from __future__ import annotations

from typing import Any

from silotune.core.registry import Registry

METHODS: Registry[Any] = Registry("method", aliases={"centralized": "centralised"})

TUNERS: Registry[Any] = Registry("tuner")

HEADS: Registry[Any] = Registry("head", reserved=("mlp", "linear", "verbalizer", "lm"))

AGGREGATIONS: Registry[Any] = Registry(
    "aggregation", reserved=("uniform", "samples", "median", "trimmed-mean", "krum", "multi-krum")
)
"""Aggregations of plug-ins; `communication.aggregation.make_aggregation` makes the built-in ones."""

CODECS: Registry[Any] = Registry("codec", reserved=("fp16", "int8", "int4"))
"""Codecs of plug-ins; `communication.uplink.make_pipeline` makes the built-in ones."""
