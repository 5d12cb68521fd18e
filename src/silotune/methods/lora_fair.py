"""LoRA-FAIR (Bian et al. 2024): the coordinator corrects the mean of B, so that B·A comes near the mean product."""

from __future__ import annotations

from silotune.methods import GLOBAL, Scope, Supervised


class LoRAFAIR(Supervised):
    """FedAvg of one LoRA with `aggregation=lora-fair` (`exact_products.py`); silos start from Ā and B̄ + ΔB."""

    name = "lora-fair"
    paper = "Bian et al. 2024, LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement"
    defaults = {"tuner": "lora", "aggregation": "lora-fair"}
    tuners = ("lora",)
    aggregations = ("lora-fair",)
    scope = Scope.SHARED
    adapter_name = GLOBAL
