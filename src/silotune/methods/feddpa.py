"""FedDPA (Yang et al. 2024): a global and a local LoRA, mixed anew for every text by its likeness to the silo's own."""

from __future__ import annotations

from typing import Literal, cast

from pydantic import Field
from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD,
    PRIVATE,
    InstanceWeighting,
    Mix,
    Part,
    Phase,
    PredictionMix,
    Representation,
    Similarity,
    Step,
    private,
    received,
)
from silotune.methods.fedit import FedIT, FedITOptions
from silotune.methods.fedlora import FedLoRA

_PAPER = "Yang et al. 2024, Dual-Personalizing Adapter for Federated Foundation Models (FedDPA)"

_EMBED: dict[str, Mix] = {"global": {GLOBAL: 1}, "local": {PRIVATE: 1}, "base": {}}


class FedDPAOptions(FedITOptions):
    """How global and local part are weighted; defaults are the paper's.

    `alpha`: the local part's weight, where it is fixed. `weighting`: dynamic (section 4.3), or fixed at `alpha`.
    `scale`: λ; where it is not set, 1 for FedDPA-F and `alpha` for FedDPA-T. `similarity`, `representation`, `samples`
    (S): of a text to the silo's rows. `embed`: under which part texts are embedded. `clip`: similarities to [0, 1].
    """

    alpha: float = Field(0.5, ge=0, le=1)
    weighting: Literal["dynamic", "fixed"] = "dynamic"
    scale: float | None = Field(None, gt=0, le=1)
    similarity: Similarity = "cosine"
    representation: Representation = "last"
    samples: int = Field(5, ge=1)
    embed: Literal["global", "local", "base"] = "global"
    clip: bool = True


class FedDPATOptions(FedDPAOptions):
    """`sees`: the global part under which the local one is trained: just trained, or as it was received."""

    sees: Literal["trained", "received"] = "trained"


def mixture(options: FedDPAOptions, scale: float) -> PredictionMix:
    """`base + (1 − α)·Δθ_g + α·Δθ_l`: α of each text, or fixed (Table 3)."""
    fixed: Mix = {GLOBAL: 1 - options.alpha, PRIVATE: options.alpha}
    if options.weighting == "fixed":
        return PredictionMix(fixed)
    weighting = InstanceWeighting(
        near=PRIVATE,
        far=GLOBAL,
        view=_EMBED[options.embed],
        similarity=options.similarity,
        representation=options.representation,
        samples=options.samples,
        scale=scale if options.scale is None else options.scale,
        clip=options.clip,
    )
    return PredictionMix(fixed, weighting=weighting)


class FedDPAF(FedLoRA):
    """Algorithm 1: trained as FedLoRA; both parts predict. λ = 1."""

    name = "feddpa-f"
    paper = _PAPER
    Options = FedDPAOptions

    def prediction(self) -> PredictionMix:
        """See `mixture`."""
        return mixture(cast(FedDPAOptions, self.options), 1.0)


class FedDPAT(FedIT):
    """Algorithm 2: in every round the global part alone, then the local one beside the frozen global one. λ = α."""

    name = "feddpa-t"
    paper = _PAPER
    Options = FedDPATOptions
    head_of_global = "head_global"

    def parts(self) -> dict[str, Part]:
        """The local part has its own draw and goes on from its last state."""
        return super().parts() | {PRIVATE: private(self.setting.tuner), HEAD: private(self.setting.head)}

    def phases(self) -> list[Phase]:
        """Global (eq. 2), then local under `(1 − α)·global + α·local` (eq. 3)."""
        options = cast(FedDPATOptions, self.options)
        seen = GLOBAL if options.sees == "trained" else received(GLOBAL)
        views: dict[str, Mix] = {"both": {seen: 1 - options.alpha, PRIVATE: options.alpha}}
        return [*super().phases(), Phase("local", trains=(PRIVATE, HEAD), views=views, loss=self.local_loss)]

    def local_loss(self, step: Step) -> Tensor:
        """Cross-entropy."""
        return step.cross_entropy("both")

    def prediction(self) -> PredictionMix:
        """See `mixture`."""
        options = cast(FedDPATOptions, self.options)
        return mixture(options, options.alpha)
