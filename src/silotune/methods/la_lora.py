"""LA-LoRA (Liu et al. 2026): silos train A and B in turn, step by step, and the coordinator averages both."""

from __future__ import annotations

from silotune.methods import HEAD, Phase, Scope
from silotune.methods.lora_factors import A, B, SplitLoRA


class LALoRA(SplitLoRA):
    """The first local step of a round trains B, the next A, and so on; B at twice the rate, a head in every step.

    From the authors' code (`DP_lora.py`, `update_FedAvg_AL`), which begins with A, although A has no gradient while B
    is zero, and counts steps anew in each pass. The paper's low-pass filter of noised gradients is left out.
    """

    name = "la-lora"
    paper = "Liu et al. 2026, Rethinking LoRA for Privacy-Preserving Federated Learning in Large Models"
    defaults = {"tuner": "lora", "tuner.lr_ratio": 2}
    a = Scope.SHARED
    b = Scope.SHARED

    def phases(self) -> list[Phase]:
        """Return one phase, in which A and B take turns."""
        turns = ((B, HEAD), (A, HEAD))
        return [Phase("train", trains=(A, B, HEAD), views={"full": self.mix}, loss=self.loss, turns=turns)]
