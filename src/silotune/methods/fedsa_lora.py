"""FedSA-LoRA (Guo et al. 2025): A is averaged, B stays in its silo; both are trained."""

from __future__ import annotations

from silotune.methods import Scope
from silotune.methods.split_lora import SplitLoRA


class FedSALoRA(SplitLoRA):
    """A learns what silos have in common, B what is a silo's own."""

    name = "fedsa-lora"
    paper = "Guo et al. 2025, Selective Aggregation for Low-Rank Adaptation in Federated Learning"
    a = Scope.SHARED
    b = Scope.PRIVATE
