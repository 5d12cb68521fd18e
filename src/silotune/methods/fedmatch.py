"""FedMatch (Chen et al. 2021): a shared adapter and a private one (the patch), trained together."""

from __future__ import annotations

from silotune.methods import GLOBAL, HEAD, PRIVATE, OneModel, Part, Phase, private, shared


class FedMatch(OneModel):
    """The backbone-patch architecture in the PEFT setting: the adapter is averaged, the patch stays."""

    name = "fedmatch"
    paper = "Chen et al. 2021, FedMatch: Federated Learning Over Heterogeneous Question Answering Data"
    mix = {GLOBAL: 0.5, PRIVATE: 0.5}

    def parts(self) -> dict[str, Part]:
        """Adapter, patch, head."""
        return {GLOBAL: shared(self.setting.tuner), PRIVATE: private(self.setting.tuner), HEAD: self.head()}

    def phases(self) -> list[Phase]:
        """One phase that trains all parts together."""
        return [Phase("train", trains=(GLOBAL, PRIVATE, HEAD), views={"full": self.mix}, loss=self.loss)]
