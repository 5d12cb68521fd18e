"""`FedAP` and `FedLR` (Zhang et al. 2023, FedPETuning): FedAvg of a bottleneck adapter, and of LoRA."""

from __future__ import annotations

from silotune.methods.fedavg import FedAvg

_PAPER = "Zhang et al. 2023, FedPETuning: When Federated Learning Meets the PEFT Methods of Pre-trained Language Models"


class FedAP(FedAvg):
    """One shared bottleneck adapter."""

    name = "fedap"
    paper = _PAPER
    defaults = {"tuner": "bottleneck"}


class FedLR(FedAvg):
    """One shared LoRA of rank 16 on query and value (589,824 parameters on RoBERTa-base)."""

    name = "fedlr"
    paper = _PAPER
    defaults = {"tuner": "lora", "tuner.r": 16}
