"""FedEx-LoRA (Singhal et al. 2024): what the means of A and B lack is added to the frozen weights."""

from __future__ import annotations

from silotune.methods.delta_lora import DeltaLoRA


class FedExLoRA(DeltaLoRA):
    """The delta holds the residuals of all rounds; `aggregation=fedex-lora` makes them (`exact_products.py`)."""

    name = "fedex-lora"
    paper = "Singhal et al. 2024, Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models"
    defaults = {"tuner": "lora", "aggregation": "fedex-lora"}
    aggregations = ("fedex-lora",)
