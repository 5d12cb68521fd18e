"""Full fine-tuning: a part holds every weight of the backbone and replaces it (FedAvg's original form)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from silotune.core.tensors import Tensors, copy
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.tuners.base import MergedAdapter, Tuner, TunerOptions, Weight, WeightedTensors, weighted_sum


class FullOptions(TunerOptions):
    """No options."""


class Full(Tuner):
    """All weights of the base transformer, named as its parameters. A mix interpolates them; weights must sum to 1.

    Training runs with the backbone's dropout, unlike all other tuners.
    """

    name = "full"
    Options = FullOptions
    trains_backbone = True

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Copy the pretrained weights."""
        return {name: tensor.cpu() for name, tensor in copy(dict(backbone.base.named_parameters())).items()}

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        plan.weights.update(interpolate(mix))
        plan.dropout = any(tensor.requires_grad for part in mix for tensor in part.tensors.values())

    @override
    def mixes_rows(self, backbone: Backbone) -> bool:
        """Return False: one forward has one set of weights."""
        return False

    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Interpolate the weights."""
        return MergedAdapter(copy(interpolate(mix)), self.options.model_dump(mode="json"))


def interpolate(mix: Sequence[WeightedTensors]) -> Tensors:
    """Compute `Σ weight · tensors`, for tuners whose parts replace the backbone's tensors."""
    weights: list[Weight] = []
    for part in mix:
        if isinstance(part.weight, Tensor) and part.weight.dim():
            raise InputError("tuner: parts that replace the backbone's tensors cannot be mixed per row")
        weights.append(part.weight)
    total = sum(float(weight.detach()) if isinstance(weight, Tensor) else weight for weight in weights)
    if abs(total - 1) > 1e-6:
        raise InputError(f"tuner: the weights of parts that replace tensors must sum to 1 (got {weights})")
    if len(mix) == 1:
        return mix[0].tensors
    return weighted_sum(mix)
