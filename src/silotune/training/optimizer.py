"""`make_optimizer`: PyTorch's optimizer of `train.optimizer`, and the groups of `train.weight_decay`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from silotune.config import TrainConfig

Group = dict[str, Any]
"""Tensors with settings of their own in an optimizer, as torch has them: `params`, `lr`, `weight_decay`, …"""

_UNDECAYED = re.compile(r"bias|layer_?norm|rms_?norm|(^|[._])(norm|ln_)", re.IGNORECASE)
"""Names of biases and of norms' weights, which transformers' Trainer leaves out of weight decay, too."""


def _decays(name: str) -> bool:
    """Whether weight decay acts on a tensor; its module's name and its own say so, not the task's or the part's."""
    return _UNDECAYED.search(".".join(name.rsplit("/", 1)[-1].split(".")[-2:])) is None


def make_groups(train: TrainConfig, tensors: Mapping[str, Tensor]) -> list[Group]:
    """Divide a silo's tensors into those whose weights decay and the others, if `train.weight_decay` is given.

    Args:
        train: the optimizer's settings.
        tensors: name → tensor.
    """
    decay = train.weight_decay
    if not decay:
        return [{"params": [*tensors.values()], **({} if decay is None else {"weight_decay": 0.0})}]
    decayed = [tensor for name, tensor in tensors.items() if _decays(name)]
    undecayed = [tensor for name, tensor in tensors.items() if not _decays(name)]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(train: TrainConfig, groups: Sequence[Tensor] | Sequence[Group]) -> torch.optim.Optimizer:
    """Make a new optimizer, whose learning rate is `train.lr` until it is set.

    Adafactor (Shazeer and Stern 2018, algorithm 4) is transformers', without relative steps and parameter scaling, as
    in prompt tuning of T5 (Lester et al. 2021): torch's Adafactor cannot switch these off.
    """
    parameters: list[Any] = [*groups]
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr)
    if train.optimizer == "adafactor":
        from transformers.optimization import Adafactor  # imports peft, which doubles the time to start

        return Adafactor(parameters, lr=train.lr, relative_step=False, scale_parameter=False)  # type: ignore[no-untyped-call]
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    tensors = [tensor for group in parameters for tensor in (group["params"] if isinstance(group, dict) else [group])]
    fused = all(tensor.dtype is torch.float32 for tensor in tensors)
    return kind(parameters, lr=train.lr, eps=train.adam_epsilon, fused=fused)
