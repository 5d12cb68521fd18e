"""FLoRA (Wang et al. 2024): silos' factors are stacked and merged into the frozen weights; then LoRA begins anew."""

from __future__ import annotations

from silotune.methods.delta_lora import DeltaLoRA


class FLoRA(DeltaLoRA):
    """The delta holds the products of all rounds; `aggregation=flora` adds them up (`exact_products.py`)."""

    name = "flora"
    paper = "Wang et al. 2024, FLoRA: Federated Fine-Tuning LLMs with Heterogeneous Low-Rank Adaptations"
    defaults = {"tuner": "lora", "aggregation": "flora"}
    aggregations = ("flora",)
    redrawn = True
