"""FFA-LoRA (Sun et al. 2024): A stays as it was drawn, the same in all silos; B alone is trained and averaged."""

from __future__ import annotations

from silotune.methods import Scope
from silotune.methods.split_lora import SplitLoRA


class FFALoRA(SplitLoRA):
    """With one A for all, the mean of the products is the product of the mean: `mean(B_k·A) = mean(B_k)·A`."""

    name = "ffa-lora"
    paper = "Sun, Li, Li and Ding 2024, Improving LoRA in Privacy-preserving Federated Learning"
    a = Scope.FIXED
    b = Scope.SHARED
