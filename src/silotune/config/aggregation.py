"""Section `aggregation`: mean or robust rule, refusal and clipping of updates, noise on their mean."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from silotune.config.extensible import ExtensibleSection, one_of
from silotune.config.registries import AGGREGATIONS


class AggregationConfig(ExtensibleSection):
    """How updates are combined.

    Attributes:
        name: the aggregation.
        outlier: updates whose change has a norm of more than so many times the median of the round's are held back, if
            there are at least 3; `null`: none is.
        max_norm: updates whose change has a larger L2 norm are refused.
        clip: the L2 norm that the change of an update is scaled down to.
        trim: the fraction of the updates that a trimmed mean cuts at each end, rounded up.
        byzantine: the number of silos in a round that Krum takes to be malicious; unset, the most that it tolerates.
        keep: the number of updates that Multi-Krum averages; unset, all but the `byzantine` ones.
        regularization: LoRA-FAIR's λ, which keeps the corrected B near the mean of B; 0: the best correction.
        noise_multiplier: standard deviation of Gaussian noise on the mean, in units of `clip` divided by the number of
            silos in a round (central differential privacy).
    """

    registry: ClassVar = AGGREGATIONS
    section: ClassVar = "aggregation"
    common: ClassVar = ("outlier", "max_norm", "clip")
    owners: ClassVar = {
        "trim": ("trimmed-mean",),
        "byzantine": ("krum", "multi-krum"),
        "keep": ("multi-krum",),
        "regularization": ("lora-fair",),
    }

    name: str = "samples"
    outlier: float | None = Field(100.0, gt=1)
    max_norm: float | None = Field(None, gt=0)
    clip: float | None = Field(None, gt=0)
    trim: float = Field(0.1, gt=0, lt=0.5)
    byzantine: int | None = Field(None, ge=0)
    keep: int | None = Field(None, ge=1)
    regularization: float = Field(0.01, ge=0)
    noise_multiplier: float | None = Field(None, gt=0)

    _known = field_validator("name", mode="before")(one_of(AGGREGATIONS))

    @model_validator(mode="after")
    def _fitting(self) -> AggregationConfig:
        if self.noise_multiplier is not None:
            if self.name != "uniform":
                raise ValueError(
                    f"noise_multiplier: noise is scaled to equal weights; needs aggregation=uniform, not {self.name}"
                )
            if self.clip is None:
                raise ValueError("noise_multiplier: the noise is in units of the clipping norm; give aggregation.clip")
        return self
