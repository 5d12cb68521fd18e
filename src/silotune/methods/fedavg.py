"""`FedAvg` (McMahan et al. 2017) of adapters, and `FedAvgFull` of all weights; the loss is `Supervised`'s.

Silos train the shared parts on their data, and the coordinator averages their updates.
"""

from __future__ import annotations

from silotune.methods import GLOBAL, Scope, Supervised


class FedAvg(Supervised):
    """FedAvg of adapters, FedMCP's "FedAvg (PEFT)". `aggregation` says whether silos are weighed equally or by rows."""

    name = "fedavg"
    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data"
    scope = Scope.SHARED
    adapter_name = GLOBAL


class FedAvgFull(FedAvg):
    """FedAvg of all weights, FedMCP's "FedAvg (Full FT)"."""

    name = "fedavg-full"
    defaults = {"tuner": "full"}
