"""FedRot-LoRA (Zhang et al. 2026): silos turn their trained LoRA toward the received one before A and B are averaged.

`B·A = (B·R)·(Rᵀ·A)` for every orthogonal R: silos may write one update in unlike coordinates, whose means cancel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from silotune.methods import GLOBAL, Phase, Scope, State, Tensors, copies, even, odd
from silotune.methods.supervised import Supervised, SupervisedOptions

A, B = ".lora_A.weight", ".lora_B.weight"


class FedRotLoRAOptions(SupervisedOptions):
    """The options of FedRot-LoRA."""

    rotation: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="λ: 0 turns nothing (FedIT), 1 turns a factor as near to the received one as it gets",
    )


class FedRotLoRA(Supervised):
    """FedAvg of one LoRA; from round 2 on silos turn A toward the received A (even rounds) or B toward B (odd ones).

    As in the authors' code (`federatedscope/rotation_alignment_tools.py`, `core/workers/client.py`), which counts
    rounds from 0. Their mean is plain; here it is `aggregation=`'s, by rows.
    """

    name = "fedrot-lora"
    paper = "Zhang et al. 2026, FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA"
    Options = FedRotLoRAOptions
    defaults = {"tuner": "lora"}
    tuners = ("lora",)
    scope = Scope.SHARED
    adapter_name = GLOBAL

    def phases(self) -> list[Phase]:
        """Return the training phase, and after it the turn toward A or B."""
        turns = {
            "turn to A": ({name: partial(self.turned, name, A) for name in self.adapters}, even),
            "turn to B": ({name: partial(self.turned, name, B) for name in self.adapters}, odd),
        }
        after = [replace(copies(name, start, rounds), from_round=2) for name, (start, rounds) in turns.items()]
        return [*super().phases(), *(after if self.adapters else [])]

    def turned(self, part: str, factor: str, state: State, received: State) -> Tensors:
        """Return a part with `B·R` and `Rᵀ·A` in each target module, R from the received A or B."""
        tensors, weight = dict(state[part]), cast(FedRotLoRAOptions, self.options).rotation
        for name in [name for name in tensors if name.endswith(A)]:
            a, b = (state[part][name.removesuffix(A) + end].cpu().double() for end in (A, B))
            reference = received[part][name.removesuffix(A) + factor].cpu().double()
            r = rotation(a @ reference.mT if factor == A else b.mT @ reference, weight)
            tensors[name] = (r.mT @ a).to(state[part][name])
            tensors[name.removesuffix(A) + B] = (b @ r).to(state[part][name])
        return tensors


def rotation(overlap: Tensor, weight: float) -> Tensor:
    """Return the rotation nearest to `(1 − λ)·I + λ·R`, where R is the one that maximizes `trace(Rᵀ·overlap)`.

    Orthogonal Procrustes: with `overlap = U·S·Vᵀ`, R is `U·Vᵀ`, with the last row of Vᵀ negated where the determinant
    would be −1, a reflection.

    Args:
        overlap: `A_k·A_refᵀ` or `B_kᵀ·B_ref`, shape (…, r, r), float64.
        weight: λ.
    """
    u, _, vh = torch.linalg.svd(overlap)
    signs = torch.ones_like(overlap[..., :1])
    signs[..., -1, :] = torch.linalg.det(u @ vh).sign().unsqueeze(-1)
    identity = torch.eye(overlap.shape[-1], dtype=overlap.dtype)
    u, _, vh = torch.linalg.svd((1 - weight) * identity + weight * (u @ (signs * vh)))
    nearest: Tensor = u @ vh
    return nearest
