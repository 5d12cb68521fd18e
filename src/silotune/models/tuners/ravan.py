"""RAVAN: several small matrices, each with a scale, between fixed bases that all silos have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.fed_sb import MIDDLE, FedSB, FedSBOptions

SCALES = "scales.weight"


class RavanOptions(FedSBOptions):
    """The options of RAVAN."""

    r: int = Field(default=32, ge=1, description="the rank of all heads together; a target module has r²/h + h numbers")
    heads: int = Field(default=4, ge=1, description="h, the number of heads, which divides r")
    bases: Literal["svd", "random"] = Field(
        default="random", description="B and A: random orthonormal ones, or the weight's largest singular vectors"
    )

    @model_validator(mode="after")
    def _equal_heads(self) -> RavanOptions:
        if self.r % self.heads:
            raise ValueError(f"heads: {self.heads} heads do not divide the rank r={self.r}")
        return self


class RavanTuner(FedSB):
    """Adds `scale·Σ_i s_i·B_i·H_i·A_i·x` to a linear layer's output; H_i and s_i are trained (Raje et al. 2025).

    Each target module has `middle.weight` (h, r/h, r/h), which starts at 0, and `scales.weight` (h,), at 1. B_i and A_i
    are the columns and rows of Fed-SB's bases, so that all are orthogonal. `method=ravan` sends `s_i·H_i`.
    """

    name = "ravan"
    Options = RavanOptions
    example = {"r": 4, "heads": 2, "alpha": 5}
    module_tensors: ClassVar[tuple[str, ...]] = (MIDDLE, SCALES)

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Tuner.init`."""
        heads, tensors = cast(RavanOptions, self.options).heads, super().init(backbone, tasks, generator)
        size = self._options.r // heads
        for name in list(tensors):
            tensors[name] = torch.zeros(heads, size, size)
            tensors[name.removesuffix(MIDDLE) + SCALES] = torch.ones(heads)
        return tensors

    @override
    def _up(self, tensors: Tensors, module: str, b: Tensor) -> Tensor:
        scales, heads = tensors[f"{module}.{SCALES}"], tensors[f"{module}.{MIDDLE}"]
        bases = b.reshape(len(b), len(heads), -1).transpose(0, 1)  # (h, out, r/h)
        return (bases @ (scales[:, None, None] * heads)).transpose(0, 1).flatten(1)
