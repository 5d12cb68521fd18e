"""Write a silo's change as whole numbers, whose sum modulo 2⁶⁴ is exact, and read the mean from such a sum.

A summand is `[w, w·q]`: the silo's weight, and its weight times each number of its change, which is clipped to
± `RANGE` and rounded stochastically to a multiple of 2^-`BITS`. No sum of `MOST_SILOS` summands leaves 64 signed bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from math import prod

import torch
from torch import Tensor

from silotune.communication.messages import Expected, pack, unpack
from silotune.core.randomness import generator
from silotune.core.tensors import Tensors
from silotune.errors import InputError, SilotuneError, needs

RANGE = 32
"""The largest absolute change of a number in a round; larger ones are clipped to it."""

BITS = 32
"""Binary places of a change."""

FEWEST_SILOS, MOST_SILOS = 3, 50

MOST_WEIGHT = 2**20
"""The largest weight of a silo: rows, or units of privacy."""

_NAME = "summand"

_FIELDS = {"round": int, "silo": str}


def require_masks() -> None:
    """Check that the packages of the protocol are installed."""
    with needs("aggregation.secure: needs cryptography and pycryptodome", "federation"):
        import_module("cryptography")
        import_module("Crypto")


def check_silos(silos: int) -> None:
    """Refuse so many silos that sums could leave 64 bits, and so few that a sum hides none of them."""
    if not FEWEST_SILOS <= silos <= MOST_SILOS:
        raise InputError(
            f"aggregation.secure: {silos} silos; sums under masks are of {FEWEST_SILOS} to {MOST_SILOS} silos"
        )


def check_weights(weights: Iterable[int]) -> None:
    """Refuse a weight of a silo with which sums could leave 64 bits."""
    largest = max(weights, default=1)
    if largest > MOST_WEIGHT:
        raise InputError(
            f"aggregation.secure: a silo's weight is {largest:,}, and sums hold at most {MOST_WEIGHT:,}; allowed: "
            "aggregation=uniform"
        )


def summand(change: Iterable[tuple[str, Tensor]], weight: int, seed: int, silo: str, number: int) -> Tensor:
    """Return a silo's summand of a round, int64; the same change has the same bits.

    Args:
        change: name → trained minus received, finite.
        weight: the silo's, between 1 and `MOST_WEIGHT`.
        seed: from which the rounding is drawn.
        silo: its name.
        number: the round.
    """
    pieces = [torch.ones(1, dtype=torch.int64)]
    for name, tensor in sorted(change):
        chance = torch.rand(tensor.shape, dtype=torch.float64, generator=generator(seed, "sum", silo, number, name))
        scaled = tensor.detach().cpu().double().clamp(-RANGE, RANGE) * 2**BITS
        pieces.append((scaled + chance).floor().to(torch.int64).reshape(-1))
    return torch.cat(pieces) * weight


def summand_message(numbers: Tensor, number: int, silo: str) -> bytes:
    """Return a summand as the message that a silo keeps until it is masked."""
    return pack({_NAME: numbers}, {"round": number, "silo": silo})


def read_summand(message: bytes, length: int) -> Tensor:
    """Return the summand in a silo's own message; `length`: its count of numbers."""
    tensors, _ = unpack(message, Expected({_NAME: (length,)}, {_NAME: torch.int64}), _FIELDS)
    return tensors[_NAME]


def summand_length(before: Tensors) -> int:
    """Return how many numbers the summand of a change of these tensors has."""
    return 1 + sum(prod(tensor.shape) for tensor in before.values())


def mean_of_sum(total: Tensor, before: Tensors) -> tuple[Tensors, int]:
    """Return the tensors plus the mean change, and the sum of the weights.

    Args:
        total: the sum of the summands, int64.
        before: the tensors of the broadcast that silos have trained.

    Raises:
        SilotuneError: no summands of silos have this sum.
    """
    weight = int(total[0])
    most = RANGE * 2**BITS * weight
    if not 1 <= weight <= MOST_SILOS * MOST_WEIGHT or bool((total[1:].abs() > most).any()):
        raise SilotuneError("the sum under masks is out of its range: a silo did not keep to the protocol")
    tensors, start = {}, 1
    for name, tensor in sorted(before.items()):
        end = start + tensor.numel()
        change = (total[start:end].double() / weight / 2**BITS).reshape(tensor.shape)
        tensors[name] = (tensor.double() + change).to(tensor.dtype)
        start = end
    return tensors, weight
