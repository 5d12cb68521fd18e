"""`make_optimizer`: PyTorch's optimizer of `train.optimizer` (Adam, AdamW, SGD, Adafactor)."""

from __future__ import annotations

import torch
from torch import Tensor

from silotune.config import TrainConfig


def make_optimizer(train: TrainConfig, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """Make a new optimizer with constant learning rate.

    Adafactor (Shazeer and Stern 2018, algorithm 4) is transformers', without relative steps and parameter scaling, as
    in prompt tuning of T5 (Lester et al. 2021): torch's Adafactor cannot switch these off.
    """
    if train.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=train.lr)
    if train.optimizer == "adafactor":
        from transformers.optimization import Adafactor  # imports peft, which doubles the time to start

        return Adafactor(tensors, lr=train.lr, relative_step=False, scale_parameter=False)  # type: ignore[no-untyped-call]
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    fused = all(tensor.dtype is torch.float32 for tensor in tensors)
    return kind(tensors, lr=train.lr, fused=fused)
