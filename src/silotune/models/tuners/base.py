"""What a tuner is: the tensors of a part, and how weighted parts act on the backbone in one forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from silotune.config.section import Section
from silotune.core.tensors import Tensors
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan

if TYPE_CHECKING:
    from silotune.data.tasks import Task
    from silotune.models.backbone.segments import Segments


Weight = float | Tensor
"""How much of a part is mixed in: one number, or a tensor of shape (rows,) for per-row mixes."""


class TunerOptions(Section, frozen=True):
    """Options common to all tuners; each tuner extends it by its own."""


@dataclass(frozen=True)
class WeightedTensors:
    """A part's tensors and its weight in one mix."""

    tensors: Tensors
    weight: Weight


class Tuner(ABC):
    """A kind of PEFT. It knows the backbone's sites and nothing of methods."""

    name: ClassVar[str]
    Options: ClassVar[type[TunerOptions]]
    trains_backbone: ClassVar[bool] = False
    """Whether a part holds the backbone's own weights (full fine-tuning), which must then be kept in float32."""

    soft_prompt: ClassVar[bool] = False
    """Whether a part is vectors among the text's embeddings, which a template may give a place."""

    def __init__(self, options: TunerOptions | None = None) -> None:
        self.options = options or self.Options()

    @abstractmethod
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """A part's tensors before training: float32, on the CPU.

        Raises:
            InputError: if the tuner cannot be put on this backbone.
        """

    @abstractmethod
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        """Write into `plan` what this mix of parts does. Parts of weight 0 are absent from `mix`."""

    def act_on_segments(
        self, backbone: Backbone, mix: Sequence[WeightedTensors], segments: Segments, plan: ForwardPlan
    ) -> bool:
        """As `act`, for silos whose rows lie behind one another: all segments in batched products.

        `mix`: tensors have a first dimension of segments, and no weight is a tensor. False: nothing was written, and
        segments are acted on one by one.
        """
        return False

    def fold(self, tensors: Tensors) -> Tensors:
        """The tensors with any reparametrization carried out, as an exported part has them.

        `act` takes folded and unfolded tensors alike; folding once spares the work where a batch is run in pieces.
        """
        return tensors

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers in training, in every forward."""
        return False

    @property
    def virtual_tokens(self) -> int:
        """How many positions before the text it takes."""
        return 0

    def mixes_rows(self, backbone: Backbone) -> bool:
        """Whether rows of one forward may have different weights on this backbone (else: one forward per mix)."""
        return backbone.known is None or backbone.known.rows_apart


def per_row(weight: Tensor, like: Tensor) -> Tensor:
    """A weight of shape (rows,), shaped and typed to be multiplied with `like` of shape (rows, tokens, …).

    A weight of shape () is the same for all rows: a number that is learned.

    Raises:
        InputError: where `like` has no such rows (a module that the backbone also uses on other things).
    """
    if weight.dim() == 0:
        return weight.to(like.device, like.dtype)
    if like.dim() < 3 or len(like) != len(weight):
        raise InputError(
            f"mix: weights differ by row ({len(weight)} rows), but a site's output of shape {tuple(like.shape)} does "
            "not; on this backbone every mix needs its own forward"
        )
    return weight.to(like.device, like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


def all_numbers(mix: Sequence[WeightedTensors]) -> list[float] | None:
    """The weights if none differs by row."""
    numbers = [part.weight for part in mix if not isinstance(part.weight, Tensor)]
    return numbers if len(numbers) == len(mix) else None
