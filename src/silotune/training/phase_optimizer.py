"""Make optimizers with their learning rates, and step all silos of a phase with one.

In float16 there is one for each silo, with dynamic loss scaling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silotune.config import TrainConfig
from silotune.core.tensors import Tensors


@dataclass(frozen=True)
class Schedule:
    """Learning rates as transformers' Trainer has them: a rise from 0 over the warmup, then the schedule's fall to 0.

    Args:
        train: peak, form and warmup.
        steps: all steps of the span.
        before: the steps of the span before this phase began.
    """

    train: TrainConfig
    steps: int
    before: int = 0

    @classmethod
    def of(cls, train: TrainConfig, steps: int, number: int, rounds: int | None) -> Schedule:
        """Return the schedule of one phase of one silo.

        Without a number of rounds, the phase does not take place in each.
        """
        if train.schedule_over == "round" or rounds is None:
            return cls(train, steps)
        return cls(train, steps * rounds, steps * (number - 1))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, given the number of earlier steps of the phase."""
        return self.train.lr * self._factor(self.before + step)

    def _factor(self, step: int) -> float:
        rise = self.train.warmup
        warmup = math.ceil(self.steps * rise) if rise < 1 else int(rise)
        if step < warmup:
            return step / warmup
        share = max(0, self.steps - step) / max(1, self.steps - warmup)
        if self.train.schedule == "linear":
            return share
        return (1 - math.cos(math.pi * share)) / 2 if self.train.schedule == "cosine" else 1.0


Group = dict[str, Any]
"""Tensors with settings of their own in an optimizer, as torch has them: `params`, `lr`, `weight_decay`, …"""

_UNDECAYED = re.compile(r"bias|layer_?norm|rms_?norm|(^|[._])(norm|ln_)", re.IGNORECASE)
"""Names of biases and of norms' weights, which transformers' Trainer leaves out of weight decay, too."""

FACTOR = "rate_factor"
"""The entry of a group that its learning rate is multiplied by."""


def make_groups(
    train: TrainConfig, tensors: Mapping[str, Tensor], rate_factor: Callable[[str], float] = lambda name: 1.0
) -> list[Group]:
    """Divide a silo's tensors by learning rate and, if `train.weight_decay` is given, by whether weights decay."""
    decay = train.weight_decay
    divided: dict[tuple[float, bool], list[Tensor]] = {}
    for name, tensor in tensors.items():
        own = ".".join(name.rsplit("/", 1)[-1].split(".")[-2:])  # of tensor and module, not of task or part
        divided.setdefault((rate_factor(name), bool(decay) and not _UNDECAYED.search(own)), []).append(tensor)
    groups: list[Group] = []
    for (factor, decays), of_group in sorted(divided.items(), key=lambda item: (item[0][0], not item[0][1])):
        of_decay = {} if decay is None else {"weight_decay": decay if decays else 0.0}
        groups.append({"params": of_group, FACTOR: factor, **of_decay})
    return groups


def make_optimizer(train: TrainConfig, groups: Sequence[Tensor] | Sequence[Group]) -> torch.optim.Optimizer:
    """Make a new optimizer, whose learning rate is `train.lr` until it is set.

    Adafactor (Shazeer and Stern 2018, algorithm 4) is transformers', without relative steps and parameter scaling, as
    in prompt tuning of T5 (Lester et al. 2021): torch's Adafactor cannot switch these off.
    """
    parameters: list[Any] = [*groups]
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, momentum=train.momentum)
    if train.optimizer == "adafactor":
        from transformers.optimization import Adafactor  # imports peft, which doubles the time to start

        return Adafactor(parameters, lr=train.lr, relative_step=False, scale_parameter=False)  # type: ignore[no-untyped-call]
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    tensors = [tensor for group in parameters for tensor in (group["params"] if isinstance(group, dict) else [group])]
    fused = all(tensor.dtype is torch.float32 for tensor in tensors)
    return kind(parameters, lr=train.lr, eps=train.adam_epsilon, fused=fused)


KEPT = "optimizer"
"""Prefix of the names under which a silo's memory keeps them: `optimizer/<phase>/<part>/<tensor>/<entry>`."""


def pack(optimizer: torch.optim.Optimizer, phase: str, leaves: Mapping[str, Tensor]) -> Tensors:
    """Return the state of an optimizer as tensors: moments, and numbers of steps."""
    return {
        f"{KEPT}/{phase}/{name}/{entry}": torch.as_tensor(value).detach().clone()
        for name, leaf in leaves.items()
        if leaf in optimizer.state
        for entry, value in optimizer.state[leaf].items()
        if value is not None
    }


def restore(optimizer: torch.optim.Optimizer, phase: str, leaves: Mapping[str, Tensor], memory: Tensors) -> None:
    """Restore the state returned by `pack` into the new optimizer of the silo's next round."""
    for name, leaf in leaves.items():
        prefix = f"{KEPT}/{phase}/{name}/"
        entries = {key.removeprefix(prefix): value for key, value in memory.items() if key.startswith(prefix)}
        if entries:
            # Adafactor counts its steps by an integer, all others by a tensor of floating point
            optimizer.state[leaf] = {
                entry: int(value) if value.dtype is torch.int64 else value.clone() for entry, value in entries.items()
            }


INITIAL_SCALE = 2.0**12
"""The factor at the beginning of a phase. PyTorch's 2¹⁶ costs the first steps of many phases, and phases are short."""


class PhaseOptimizer:
    """The optimizers of the silos that train together in one phase.

    Gradients below 6·10⁻⁸ are zero in float16. There every silo has an optimizer and a factor of its own (dynamic loss
    scaling, Micikevicius et al. 2018): its loss is multiplied before the backward pass, its gradients are divided
    afterwards, and a step whose gradients are not finite is skipped and halves the factor. A silo's steps then do not
    depend on its cohort. The factor is reset in every phase, so that no state outlives it. With other types nothing is
    scaled, and one optimizer serves all silos, because optimizers update tensor by tensor; the silos' learning rates
    are their own, and so are the norms to which gradients are clipped.

    `leaves` are each silo's tensors that train, by name; `scaled` says whether the backward pass runs in float16.
    """

    def __init__(
        self,
        train: TrainConfig,
        leaves: Sequence[Mapping[str, Tensor]],
        schedules: Sequence[Schedule],
        device: torch.device,
        scaled: bool,
        rate_factor: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        self._leaves, self._schedules, self._clip_norm = leaves, schedules, train.clip_norm
        groups = [make_groups(train, named, rate_factor) for named in leaves]
        together = groups if scaled else [[group for own in groups for group in own]]
        self._optimizers = [make_optimizer(train, own) for own in together]
        in_order = iter([group for optimizer in self._optimizers for group in optimizer.param_groups])
        self._groups: list[list[Group]] = [[next(in_order) for _ in own] for own in groups]
        self._scalers = [torch.amp.GradScaler(device.type, INITIAL_SCALE) for _ in leaves] if scaled else []
        self._skipped = [torch.zeros((), device=device) for _ in self._scalers]

    def zero_grad(self) -> None:
        """Remove all gradients, before a step's backward passes."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)  # without a gradient, a silo that has left stays as it is

    def scaled(self, silo: int, loss: Tensor) -> Tensor:
        """Return the loss of a silo, by position, as its backward pass begins with it."""
        return self._scalers[silo].scale(loss) if self._scalers else loss

    def step(self, silos: Mapping[int, int]) -> None:
        """Update the leaves of the silos, by position, that took part in the last backward passes.

        Args:
            silos: their positions → the steps of the phase that each has taken, without skipped ones: as in
                transformers' Trainer, a skipped step leaves the schedule where it is.
        """
        for silo, count in silos.items():
            for group in self._groups[silo]:
                group["lr"] = self._schedules[silo].rate(count) * group[FACTOR]
            if self._scalers:
                self._scalers[silo].unscale_(self._optimizers[silo])
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([*self._leaves[silo].values()], self._clip_norm)
        if not self._scalers:
            self._optimizers[0].step()
            return
        for silo in silos:
            scaler = self._scalers[silo]
            scaler.step(self._optimizers[silo])  # fused optimizers decide on the device, without a transfer
            before = self._factor(silo)
            scaler.update()
            self._skipped[silo] += self._factor(silo) < before

    def skips(self, silo: int) -> dict[str, Tensor]:
        """Return how many steps a silo has skipped, shape (), on the device; empty where nothing is scaled."""
        return {"skipped": self._skipped[silo]} if self._scalers else {}

    def skipped(self) -> list[int]:
        """Return each silo's number of skipped steps; empty where nothing is scaled."""
        return [int(number) for number in torch.stack(self._skipped).tolist()] if self._scalers else []

    def state(self, silo: int, phase: str) -> Tensors:
        """Return the state of a silo's optimizer, by the silo's position; see `optimizer.pack`."""
        return pack(self._of(silo), phase, self._leaves[silo])

    def restore(self, silo: int, phase: str, memory: Tensors) -> None:
        """Set the state of a silo's optimizer to the one that its memory keeps, if it keeps any."""
        restore(self._of(silo), phase, self._leaves[silo], memory)

    def _of(self, silo: int) -> torch.optim.Optimizer:
        return self._optimizers[silo if self._scalers else 0]

    def _factor(self, silo: int) -> Tensor:
        """Return a silo's present factor of the learning rate, shape (), on the device."""
        return self._scalers[silo].scale(torch.ones_like(self._skipped[silo]))
