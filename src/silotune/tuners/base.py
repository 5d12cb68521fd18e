"""What a tuner is: the tensors of a part, and how weighted parts act on the backbone in one forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from silotune.backbone import Backbone, Plan
from silotune.parts import Tensors

if TYPE_CHECKING:
    from silotune.data.tasks import Task

Weight = float | Tensor
"""How much of a part is mixed in: one number, or a tensor of shape (rows,) for per-row mixes."""


class TunerOptions(BaseModel):
    """Options common to all tuners; each tuner extends it by its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Weighted:
    """A part's tensors and its weight in one mix."""

    tensors: Tensors
    weight: Weight


class Tuner(ABC):
    """A kind of PEFT. It knows the backbone's sites and nothing of methods."""

    name: ClassVar[str]
    Options: ClassVar[type[TunerOptions]]
    trains_backbone: ClassVar[bool] = False
    """Whether a part holds tensors of the backbone itself (full fine-tuning, BitFit)."""

    def __init__(self, options: TunerOptions | None = None) -> None:
        self.options = options or self.Options()

    @abstractmethod
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """A part's tensors before training: float32, on the CPU."""

    @abstractmethod
    def act(self, backbone: Backbone, mix: Sequence[Weighted], plan: Plan) -> None:
        """Write into `plan` what this mix of parts does. Parts of weight 0 are absent from `mix`."""


def scale(output: Tensor, weight: Weight) -> Tensor:
    """`weight · output`, where a per-row weight of shape (rows,) meets an output of shape (rows, …)."""
    if isinstance(weight, Tensor):
        return output * weight.to(output.dtype).reshape(-1, *([1] * (output.dim() - 1)))
    return output if weight == 1 else output * weight


def total(outputs: Sequence[Tensor]) -> Tensor:
    """Their sum, taken before it meets the backbone's output: ½ + ½ of a part with itself is then exactly the part."""
    result = outputs[0]
    for output in outputs[1:]:
        result = result + output
    return result
