"""FlexLoRA (Bai et al. 2024): the coordinator averages products B·A, and cuts their mean to LoRA's rank by an SVD."""

from __future__ import annotations

from silotune.methods import GLOBAL, Scope, Supervised


class FlexLoRA(Supervised):
    """FedAvg of one LoRA with `aggregation=flexlora` (`aggregation/low_rank.py`); ranks may differ."""

    name = "flexlora"
    paper = "Bai et al. 2024, Federated Fine-tuning of LLMs under Heterogeneous Tasks and Client Resources"
    defaults = {"tuner": "lora", "aggregation": "flexlora"}
    tuners = ("lora",)
    aggregations = ("flexlora",)
    scope = Scope.SHARED
    adapter_name = GLOBAL
