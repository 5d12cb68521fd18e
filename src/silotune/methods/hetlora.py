"""HetLoRA (Cho et al. 2024): one LoRA of several ranks, cut for each silo; padded with zeros and weighted by norm."""

from __future__ import annotations

from silotune.methods import GLOBAL, Scope, Supervised


class HetLoRA(Supervised):
    """FedAvg of one LoRA with `aggregation=hetlora` (`communication/aggregation/low_rank.py`).

    The paper's pruning of ranks during the run is left out: a silo keeps its rank.
    """

    name = "hetlora"
    paper = "Cho et al. 2024, Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models"
    defaults = {"tuner": "lora", "aggregation": "hetlora"}
    tuners = ("lora",)
    scope = Scope.SHARED
    adapter_name = GLOBAL
