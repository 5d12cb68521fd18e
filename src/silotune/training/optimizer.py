"""Make PyTorch's optimizer for a phase, and keep its state in a silo's memory between rounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from silotune.config import TrainConfig
from silotune.core.tensors import Tensors

Group = dict[str, Any]
"""Tensors with settings of their own in an optimizer, as torch has them: `params`, `lr`, `weight_decay`, …"""

_UNDECAYED = re.compile(r"bias|layer_?norm|rms_?norm|(^|[._])(norm|ln_)", re.IGNORECASE)
"""Names of biases and of norms' weights, which transformers' Trainer leaves out of weight decay, too."""


def _decays(name: str) -> bool:
    """Whether weight decay acts on a tensor, judged by the names of tensor and module, not of task or part."""
    return _UNDECAYED.search(".".join(name.rsplit("/", 1)[-1].split(".")[-2:])) is None


FACTOR = "rate_factor"
"""The entry of a group that its learning rate is multiplied by."""


def make_groups(
    train: TrainConfig, tensors: Mapping[str, Tensor], rate_factor: Callable[[str], float] = lambda name: 1.0
) -> list[Group]:
    """Divide a silo's tensors by learning rate and, if `train.weight_decay` is given, by whether weights decay.

    Args:
        train: the optimizer's settings.
        tensors: name → tensor.
        rate_factor: name → factor of the learning rate.
    """
    decay = train.weight_decay
    divided: dict[tuple[float, bool], list[Tensor]] = {}
    for name, tensor in tensors.items():
        divided.setdefault((rate_factor(name), bool(decay) and _decays(name)), []).append(tensor)
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
        return torch.optim.SGD(parameters, lr=train.lr)
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
            optimizer.state[leaf] = {entry: _as_it_was(value) for entry, value in entries.items()}


def _as_it_was(value: Tensor) -> Tensor | int:
    """Copy a tensor; Adafactor counts its steps by an integer, all others by a tensor of floating point."""
    return int(value) if value.dtype is torch.int64 else value.clone()
