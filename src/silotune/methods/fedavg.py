"""FedAvg (McMahan et al. 2017): clients train on their data, the coordinator averages what they send."""

from __future__ import annotations

from silotune.methods import GLOBAL, Scope, Supervised


class FedAvg(Supervised):
    """FedAvg of adapters, FedMCP's "FedAvg (PEFT)". Averaged uniformly or by rows: `aggregation`."""

    name = "fedavg"
    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data"
    scope = Scope.SHARED
    stem = GLOBAL


class FedAvgFull(FedAvg):
    """FedAvg of all weights, FedMCP's "FedAvg (Full FT)"."""

    name = "fedavg-full"
    defaults = {"tuner": "full"}
