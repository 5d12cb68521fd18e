"""List the built-in codecs by their names in `uplink=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from silotune.communication.uplink.codecs import Codec, Float16, UniformQuantizer
from silotune.communication.uplink.sparse import RandomK, TopK

if TYPE_CHECKING:
    from silotune.config.uplink import UplinkConfig

BUILT_IN_CODECS: dict[str, type[Codec] | Callable[[UplinkConfig], Codec]] = {
    "fp16": Float16,
    "int8": lambda config: UniformQuantizer(127, config.rounding == "stochastic"),
    "int4": lambda config: UniformQuantizer(7, config.rounding == "stochastic"),
    "topk": TopK,
    "randomk": RandomK,
}
"""Classes, made with their `Options`; or functions of the section, where an option is one of its own keys."""
