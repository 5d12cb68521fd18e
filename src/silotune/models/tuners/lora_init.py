"""Draw LoRA's first A and B as `tuner.init` says, or take them from a module's weight (PiSSA)."""

from __future__ import annotations

import math
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from silotune.core.randomness import generator as derived_generator
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.initializers import uniform
from silotune.models.tuners.target_modules import layer_weight, layer_widths

Factors = tuple[Tensor, Tensor]
"""A of shape (r, in) and B of shape (out, r)."""

_PRINCIPAL: WeakKeyDictionary[Backbone, dict[tuple[str, int, torch.device], Factors]] = WeakKeyDictionary()


def _uniform(inputs: int, outputs: int, rank: int, draws: torch.Generator) -> Factors:
    """Draw A uniform in ±1/√in, and B of zeros, as in LoRA's authors' code and in peft."""
    return uniform(draws, 1 / math.sqrt(inputs), rank, inputs), torch.zeros(outputs, rank)


def _orthogonal(inputs: int, outputs: int, rank: int, draws: torch.Generator) -> Factors:
    """Draw A and B along orthogonal directions, so that B·A is zero while neither is; a tenth of normal draws.

    As `init_lora_weights="orthogonal"` of peft. The directions are the same in every part, so that B·A is zero also
    where A and B are parts of their own.
    """
    directions = torch.linalg.qr(torch.randn(rank, rank, generator=derived_generator(0, "orthogonal start", rank)))[0]
    a = torch.randn(inputs, rank // 2, generator=draws) @ directions[0::2]
    b = torch.randn(outputs, rank // 2, generator=draws) @ directions[1::2]
    return a.T.contiguous() / 10, b / 10


INITS: dict[str, Callable[[int, int, int, torch.Generator], Factors]] = {
    "uniform": _uniform,
    "orthogonal": _orthogonal,
}
"""Value of `tuner.init` → a function of width in, width out, rank and generator; of `pissa`: `principal_factors`."""


def principal_factors(backbone: Backbone, module: str, rank: int, device: torch.device) -> Factors:
    """Return `√Σ·Vᵀ` and `U·√Σ` of the `rank` largest singular values of a module's weight W = U·Σ·Vᵀ, float32.

    PiSSA (Meng et al. 2024, eqs. 2 and 3). They are computed once for a backbone and a device. The largest entry of
    each row of Vᵀ is positive, so that machines agree on signs.
    """
    known = _PRINCIPAL.setdefault(backbone, {})
    if (module, rank, device) not in known:
        layer = backbone.module(module)
        most = min(layer_widths(layer))
        if rank > most:
            raise InputError(f"tuner.r: init=pissa takes singular values of {module}, which has {most}; {rank} asked")
        a, b = _principal(layer_weight(layer).detach().float(), rank)
        factors = a.to(device), b.to(device)
        if isinstance(a, FakeTensor):  # of a plan; kept, they would stand for the factors themselves
            return factors
        known[module, rank, device] = factors
    return known[module, rank, device]


def _principal(weight: Tensor, rank: int) -> Factors:
    u, values, vh = torch.linalg.svd(weight, full_matrices=False)
    u, values, vh = u[:, :rank], values[:rank].sqrt(), vh[:rank]
    largest = vh.gather(1, vh.abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0)
    return (signs * vh * values.unsqueeze(1)).contiguous(), (u * signs.T * values).contiguous()
