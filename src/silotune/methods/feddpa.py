"""FedDPA-F and FedDPA-T (Yang et al. 2024): a global and a local LoRA, mixed by each text's similarity.

The paper's local LoRA is the part `PRIVATE`. FedDPA-F trains it after the rounds, FedDPA-T in every round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from silotune.methods import (
    GLOBAL,
    HEAD,
    HEAD_GLOBAL,
    PRIVATE,
    InstanceWeighting,
    Mix,
    Part,
    Phase,
    PredictionMix,
    Representation,
    Similarity,
    Step,
    WeightOf,
    mean_over_rows,
    private,
    received,
)
from silotune.methods.fedit import FedIT, FedITOptions
from silotune.methods.fedlora import FedLoRA, FedLoRAOptions

_PAPER = "Yang et al. 2024, Dual-Personalizing Adapter for Federated Foundation Models (FedDPA)"

_WEIGHTS = frozenset({"weighting", "weight_of", "scale", "similarity", "representation", "samples", "embed", "clip"})

_EMBED: dict[str, Mix] = {"global": {GLOBAL: 1}, "local": {PRIVATE: 1}, "base": {}}


class FedDPAOptions(FedITOptions):
    """The options for the weights of the global and the local part; the defaults are the paper's.

    The authors' code differs from the paper: docs/feddpa-readings.md.
    """

    alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="weight of the local part when FedDPA-T trains it, and at prediction with `weighting=fixed`",
    )
    weighting: Literal["dynamic", "fixed"] = Field(
        default="dynamic", description="`dynamic`: a weight α per text (section 4.3); or `fixed`"
    )
    weight_of: WeightOf = Field(
        default="local", description="the part with weight α at prediction; the other one has 1 − α"
    )
    scale: float | None = Field(
        default=None, gt=0, le=1, description="λ; by default 1 for FedDPA-F and `alpha` for FedDPA-T"
    )
    similarity: Similarity = Field(default="cosine", description="similarity of a text and the silo's rows")
    representation: Representation = Field(default="last", description="pooling of a text's states")
    samples: int = Field(default=5, ge=1, description="S, number of rows that a text is compared with")
    embed: Literal["global", "local", "base"] = Field(
        default="global", description="the part with which texts are embedded"
    )
    clip: bool = Field(default=True, description="clip similarities to [0, 1]")


class FedDPAFOptions(FedDPAOptions, FedLoRAOptions):
    """The options of FedDPA-F."""


class FedDPATOptions(FedDPAOptions):
    """The options of FedDPA-T."""

    order: Literal["global-first", "local-first"] = Field(
        default="global-first",
        description="the part that a round trains first; with `local-first`, round 1 trains only the global one",
    )
    sees: Literal["trained", "received"] = Field(
        default="trained",
        description="the global part used while the local one trains: as trained in this round, or as received (always "
        "with `order=local-first`)",
    )


def prediction_mix(options: FedDPAOptions, scale: float) -> PredictionMix:
    """Return the mix `base + (1 − α)·Δθ_g + α·Δθ_l`, with α computed for each text or fixed (Table 3).

    With `weight_of=global` the two weights are exchanged.
    """
    weighted, other = (PRIVATE, GLOBAL) if options.weight_of == "local" else (GLOBAL, PRIVATE)
    fixed: Mix = {other: 1 - options.alpha, weighted: options.alpha}
    if options.weighting == "fixed":
        return PredictionMix(fixed)
    weighting = InstanceWeighting(
        local_part=PRIVATE,
        global_part=GLOBAL,
        view=_EMBED[options.embed],
        similarity=options.similarity,
        representation=options.representation,
        samples=options.samples,
        scale=scale if options.scale is None else options.scale,
        clip=options.clip,
        weight_of=options.weight_of,
    )
    return PredictionMix(fixed, weighting=weighting)


class FedDPAF(FedLoRA):
    """FedDPA-F: train both parts as in FedLoRA, and predict with both; λ = 1 (Algorithm 1)."""

    name = "feddpa-f"
    paper = _PAPER
    Options = FedDPAFOptions
    at_prediction = _WEIGHTS | {"alpha"}

    @override
    def prediction(self) -> PredictionMix:
        return prediction_mix(cast(FedDPAOptions, self.options), 1.0)


class FedDPAT(FedIT):
    """FedDPA-T: in each round train the global part, then the local one beside it, frozen; λ = α (Algorithm 2)."""

    name = "feddpa-t"
    paper = _PAPER
    Options = FedDPATOptions
    at_prediction = _WEIGHTS
    head_of_global = HEAD_GLOBAL

    def parts(self) -> dict[str, Part]:
        """Return FedIT's parts, and a local part with initial values of its own that keeps its state."""
        return super().parts() | {PRIVATE: private(self.setting.tuner), HEAD: private(self.setting.head)}

    def phases(self) -> list[Phase]:
        """Train global (eq. 2), then local in `(1 − α)·global + α·local` (eq. 3); or local first, from round 2 on."""
        options = cast(FedDPATOptions, self.options)
        global_part = GLOBAL if options.sees == "trained" else received(GLOBAL)
        views: dict[str, Mix] = {"both": {global_part: 1 - options.alpha, PRIVATE: options.alpha}}
        local = Phase("local", trains=(PRIVATE, HEAD), views=views, loss=self.local_loss)
        if options.order == "local-first":
            return [replace(local, from_round=2), *super().phases()]
        return [*super().phases(), local]

    @mean_over_rows
    def local_loss(self, step: Step) -> Tensor:
        """Cross-entropy."""
        return step.cross_entropy("both")

    @override
    def prediction(self) -> PredictionMix:
        options = cast(FedDPATOptions, self.options)
        return prediction_mix(options, options.alpha)
