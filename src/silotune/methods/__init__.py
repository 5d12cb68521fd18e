"""The algorithms. A new one is a file here and a line in `METHODS`."""

from silotune.methods.base import Method, MethodOptions, Phase, Prediction, Setting, Step, previous, received
from silotune.methods.centralised import Centralised
from silotune.methods.fedavg import FedAvg, FedAvgFull
from silotune.methods.fedmcp import FedMCP
from silotune.methods.fedprox import FedProx
from silotune.methods.local import Local

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Local, Centralised, FedAvg, FedAvgFull, FedProx, FedMCP)
}

__all__ = [
    "METHODS",
    "Method",
    "MethodOptions",
    "Phase",
    "Prediction",
    "Setting",
    "Step",
    "previous",
    "received",
]
