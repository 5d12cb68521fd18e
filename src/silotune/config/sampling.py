"""Section `sampling`: how many silos train in a round, drawn from all silos or from those of each task."""

from __future__ import annotations

from pydantic import Field, model_validator

from silotune.config.section import Section


class SamplingConfig(Section):
    """The silos of a round: a fraction or a number of them; all silos if neither key is set.

    Attributes:
        fraction: the fraction of the silos, rounded up.
        count: the number of silos.
        per_task: whether the fraction or number holds for each task's silos (FedDPA, appendix A.1).
    """

    fraction: float | None = Field(None, gt=0, le=1)
    count: int | None = Field(None, ge=1)
    per_task: bool = False

    @model_validator(mode="after")
    def _fraction_or_count(self) -> SamplingConfig:
        if self.fraction is not None and self.count is not None:
            raise ValueError("fraction and count exclude each other; unset one (sampling.fraction= or sampling.count=)")
        if self.per_task and self.fraction is None and self.count is None:
            raise ValueError("per_task: how many of each task's silos? give sampling.fraction or sampling.count too")
        return self
