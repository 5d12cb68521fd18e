"""What a package may add to silotune: a method, a tuner, a head, a kind of task, aggregations and codecs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import BaseModel, Field

from silotune import Method, MethodOptions, Phase, Step, Tuner, TunerOptions, register_aggregation, shared
from silotune.data.kinds import Classification
from silotune.methods import GLOBAL, HEAD, PredictionMix
from silotune.models.heads import LinearHead


class HalfOptions(MethodOptions):
    """`factor`: of the loss."""

    factor: float = Field(0.5, gt=0)


class HalfFedAvg(Method):
    """FedAvg whose loss is scaled; it is defined for two tuners, and brings one of them and an aggregation along."""

    name = "half-fedavg"
    paper = "an example"
    Options = HalfOptions
    defaults = {"tuner": "offset", "aggregation": "midrange"}
    tuners = ("offset", "lora")

    def parts(self):
        return {GLOBAL: shared(self.setting.tuner), HEAD: self.head()}

    def phases(self):
        return [Phase("train", trains=(GLOBAL, HEAD), views={"full": {GLOBAL: 1}}, loss=self.loss)]

    def loss(self, step: Step):
        return self.options.factor * step.cross_entropy("full")

    def prediction(self):
        return PredictionMix({GLOBAL: 1})


class Graded(Classification):
    """Labels that are judged by balanced accuracy unless the configuration says otherwise."""

    name = "graded"
    metrics = ("balanced_accuracy", "accuracy")


class OffsetOptions(TunerOptions):
    """`scale`: of what is added."""

    scale: float = 2.0


class Offset(Tuner):
    """Adds a vector to the output of the last linear layer of the backbone's first block."""

    name = "offset"
    Options = OffsetOptions

    def init(self, backbone, tasks, generator):
        modules = dict(backbone.base.named_modules())
        site = next(name for name in reversed(modules) if isinstance(modules[name], torch.nn.Linear))
        return {f"{site}.offset": torch.zeros(modules[site].out_features)}

    def act(self, backbone, mix, plan):
        for name in mix[0].tensors:
            offset = sum(part.weight * part.tensors[name] for part in mix) * self.options.scale
            plan.outputs[name.removesuffix(".offset")].append(lambda _, y, offset=offset: y + offset.to(y.dtype))


class ScaledOptions(BaseModel):
    """`factor`: of the logits."""

    factor: float = 3.0


class ScaledLinear(LinearHead):
    """A linear head with scaled logits."""

    name = "scaled-linear"
    Options = ScaledOptions

    def __init__(self, pooling, factor):
        super().__init__(pooling)
        self.factor = factor

    @classmethod
    def make(cls, config):
        return cls(config.pooling, config.options["factor"])

    def logits(self, tensors, view, task):
        return self.factor * super().logits(tensors, view, task)


def midrange(updates: Iterable):
    """The middle between the smallest and the largest value of every coordinate."""
    tensors = [update.tensors for update in updates]
    stacked = {name: torch.stack([each[name] for each in tensors]) for name in tensors[0]}
    return {name: (values.amin(0) + values.amax(0)) / 2 for name, values in stacked.items()}


class ShrunkOptions(BaseModel):
    """`factor`: of the mean."""

    factor: float = Field(0.9, gt=0, le=1)


@register_aggregation("shrunk-mean")
class ShrunkMean:
    """The mean, shrunk."""

    Options = ShrunkOptions

    def __init__(self, options: ShrunkOptions) -> None:
        self.factor = options.factor

    def __call__(self, updates: Iterable):
        tensors = [update.tensors for update in updates]
        return {name: sum(each[name] for each in tensors) / len(tensors) * self.factor for name in tensors[0]}


class Sign:
    """One sign per number and one scale per tensor."""

    draws = False

    def layout(self, shape):
        return {"": (shape, torch.int8), ":scale": ((), torch.float32)}

    def encode(self, tensor, uniform=None):
        scale = tensor.abs().mean() if tensor.numel() else tensor.new_zeros(())
        return {"": tensor.sign().to(torch.int8), ":scale": scale.float()}

    def decode(self, written, shape):
        return written[""].float() * written[":scale"]


class RoundedOptions(BaseModel):
    """`step`: numbers become multiples of it."""

    step: float = Field(0.001, gt=0)


class Rounded:
    """Float32 numbers, rounded."""

    draws = False
    Options = RoundedOptions

    def __init__(self, options: RoundedOptions) -> None:
        self.step = options.step

    def layout(self, shape):
        return {"": (shape, torch.float32)}

    def encode(self, tensor, uniform=None):
        return {"": ((tensor / self.step).round() * self.step).float()}

    def decode(self, written, shape):
        return written[""]
