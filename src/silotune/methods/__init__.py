"""The algorithms. A new one is a file here and a line in `METHODS`."""

from __future__ import annotations

from typing import TypeVar

from silotune.config import registries
from silotune.core.registry import Registry
from silotune.methods.base import Method, MethodOptions, Phase, PredictionMix, Setting, Step
from silotune.methods.centralized import Centralized
from silotune.methods.ditto import Ditto
from silotune.methods.fedap import FedAP, FedLR
from silotune.methods.fedavg import FedAvg, FedAvgFull
from silotune.methods.feddpa import FedDPAF, FedDPAT
from silotune.methods.fedfame import FedFAME
from silotune.methods.fedit import FedIT
from silotune.methods.fedlora import FedLoRA
from silotune.methods.fedmatch import FedMatch
from silotune.methods.fedmcp import FedMCP
from silotune.methods.fedper import FedPer
from silotune.methods.fedprompt import FedPrompt
from silotune.methods.fedprox import FedProx
from silotune.methods.fedrep import FedRep
from silotune.methods.local import Local
from silotune.methods.moon import MOON
from silotune.models.forward.mixing import previous, received

_ALL: tuple[type[Method], ...] = (
    *(Local, Centralized, FedAvg, FedAvgFull, FedProx),
    *(FedAP, FedLR, MOON, FedRep, FedPer, FedMatch, Ditto, FedMCP, FedFAME, FedPrompt),
    *(FedIT, FedLoRA, FedDPAF, FedDPAT),
)

METHODS: Registry[type[Method]] = registries.METHODS

METHODS.base = Method

METHODS.provide({method.name: method for method in _ALL})


Kind = TypeVar("Kind", bound=type[Method])


def register_method(method: Kind) -> Kind:
    """Make a method known in this process, under its `name`; also a decorator of its class.

    Processes that a run starts know it if their script or an entry point of group `silotune.methods` registers it.

    Raises:
        InputError: the name is taken.
    """
    METHODS.register(getattr(method, "name", ""), method)
    return method


__all__ = [
    "METHODS",
    "Method",
    "MethodOptions",
    "Phase",
    "PredictionMix",
    "Setting",
    "Step",
    "previous",
    "received",
    "register_method",
]
