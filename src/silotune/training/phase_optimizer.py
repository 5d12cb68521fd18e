"""`PhaseOptimizer`: one optimizer for all silos of a phase; in float16 one for each, with dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from silotune.config import TrainConfig
from silotune.training.optimizer import make_optimizer

INITIAL_SCALE = 2.0**12
"""The factor at the beginning of a phase. PyTorch's 2¹⁶ costs the first steps of many phases, and phases are short."""


class PhaseOptimizer:
    """The optimizers of the silos that train together in one phase.

    Gradients below 6·10⁻⁸ are zero in float16. There every silo has an optimizer and a factor of its own (dynamic loss
    scaling, Micikevicius et al. 2018): its loss is multiplied before the backward pass, its gradients are divided
    afterwards, and a step whose gradients are not finite is skipped and halves the factor. A silo's steps then do not
    depend on its cohort; the factor begins anew in every phase, so that no state outlives it. Otherwise nothing is
    scaled, and one optimizer serves all silos, because optimizers update tensor by tensor.

    Args:
        train: the optimizer's settings.
        leaves: each silo's tensors that train.
        device: where they are.
        scaled: whether the backward pass runs in float16.
    """

    def __init__(
        self, train: TrainConfig, leaves: Sequence[Sequence[Tensor]], device: torch.device, scaled: bool
    ) -> None:
        groups = leaves if scaled else [[tensor for tensors in leaves for tensor in tensors]]
        self._optimizers = [make_optimizer(train, [*group]) for group in groups]
        self._scalers = [torch.amp.GradScaler(device.type, INITIAL_SCALE) for _ in leaves] if scaled else []
        self._skipped = [torch.zeros((), device=device) for _ in self._scalers]

    def zero_grad(self) -> None:
        """Remove all gradients, before a step's backward passes."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)  # without a gradient, a silo that has left stays as it is

    def scaled(self, silo: int, loss: Tensor) -> Tensor:
        """Return the loss of a silo, by position, as its backward pass begins with it."""
        return self._scalers[silo].scale(loss) if self._scalers else loss

    def step(self, silos: Collection[int]) -> None:
        """Update the leaves of the silos, by position, that took part in the last backward passes."""
        if not self._scalers:
            self._optimizers[0].step()
            return
        for silo in silos:
            scaler = self._scalers[silo]
            scaler.unscale_(self._optimizers[silo])
            scaler.step(self._optimizers[silo])  # fused optimizers decide on the device, without a transfer
            before = self._factor(silo)
            scaler.update()
            self._skipped[silo] += self._factor(silo) < before

    def skipped(self) -> list[int]:
        """Return each silo's number of skipped steps; empty where nothing is scaled."""
        return [int(number) for number in torch.stack(self._skipped).tolist()] if self._scalers else []

    def _factor(self, silo: int) -> Tensor:
        """A silo's present factor, shape (), on the device."""
        return self._scalers[silo].scale(torch.ones_like(self._skipped[silo]))
