"""The optimizers of local training."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.optimization import Adafactor

from silotune.config import TrainConfig


def make_optimizer(train: TrainConfig, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """A fresh optimizer with constant learning rate.

    Adafactor too (Shazeer and Stern 2018, algorithm 4 without relative steps and parameter scaling), as prompt tuning
    on T5 has it (Lester et al. 2021): torch's own can be neither.
    """
    if train.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=train.lr)
    if train.optimizer == "adafactor":
        return Adafactor(tensors, lr=train.lr, relative_step=False, scale_parameter=False)  # type: ignore[no-untyped-call]
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    fused = all(tensor.dtype is torch.float32 for tensor in tensors)
    return kind(tensors, lr=train.lr, fused=fused)
