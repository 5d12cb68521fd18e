"""FedSVD (Lee et al. 2025): silos train B; the coordinator makes A and B anew from an SVD of mean(B)·A."""

from __future__ import annotations

from silotune.methods import HEAD, Phase, Scope
from silotune.methods.split_lora import B, SplitLoRA


class FedSVD(SplitLoRA):
    """B alone is trained, with `aggregation=fedsvd` (`aggregation/low_rank.py`). Silos never send A."""

    name = "fedsvd"
    paper = "Lee et al. 2025, FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA"
    defaults = {"tuner": "lora", "aggregation": "fedsvd"}
    a = Scope.SHARED
    b = Scope.SHARED

    def phases(self) -> list[Phase]:
        """B and the head; A is as the coordinator made it."""
        return [Phase("train", trains=(B, HEAD), views={"full": self.mix}, loss=self.loss)]
