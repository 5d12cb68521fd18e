"""The registries of methods, tuners, heads, aggregations and codecs, which their rooms fill.

The `reserved` names are built in; no plug-in may take them. What a room adds to its own list is registered too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from silotune.core.registry import Registry

METHODS: Registry[Any] = Registry("method", aliases={"centralized": "centralised"})

TUNERS: Registry[Any] = Registry("tuner")

HEADS: Registry[Any] = Registry(
    "head", reserved=("mlp", "linear", "verbalizer", "lm", "dpo"), home="silotune.models.heads"
)

AGGREGATIONS: Registry[Any] = Registry(
    "aggregation",
    reserved=(
        *("uniform", "samples", "median", "flexlora", "hetlora", "fedsvd", "fedex-lora", "flora", "lora-fair"),
        *("rest-of-world",),
        *("trimmed-mean", "krum", "multi-krum"),
    ),
    home="silotune.aggregation",
)
"""`aggregation.make_aggregation` makes the reserved ones, whose options are keys of the section."""

CODECS: Registry[Any] = Registry("codec", reserved=("fp16", "int8", "int4"), home="silotune.communication.uplink")
"""`communication.uplink.make_pipeline` makes the reserved ones, whose options are keys of the section."""


def subclass_problem(base: type) -> Callable[[object], str | None]:
    """Make the `problem` of a registry of classes: allowed are complete subclasses of `base`."""

    def problem(value: object) -> str | None:
        if not (isinstance(value, type) and issubclass(value, base)):
            return f"must be a subclass of {base.__name__} (got {value!r})"
        missing = sorted(getattr(value, "__abstractmethods__", ()))
        return f"class {value.__name__} does not define {', '.join(missing)}" if missing else options_problem(value)

    return problem


def options_problem(value: object) -> str | None:
    """Return what is wrong with a plug-in's `Options`, if it has any."""
    options = getattr(value, "Options", None)
    if options is None or (isinstance(options, type) and issubclass(options, BaseModel)):
        return None
    return f"its Options must be a subclass of pydantic's BaseModel (got {options!r})"
