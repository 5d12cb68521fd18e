"""Write a silo's change as whole numbers, whose sum modulo 2⁶⁴ is exact, and read the mean from such a sum.

A summand is `[w, w·q]`: the silo's weight, and its weight times each number of its change, which is clipped to
± `RANGE` and rounded stochastically to a multiple of 2^-`BITS`. No sum of `MOST_SILOS` summands leaves 64 signed bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from silotune.core.randomness import generator
from silotune.core.serialization import read_tensors, tensor_bytes
from silotune.core.tensors import Tensors
from silotune.errors import InputError, SilotuneError, needs

RANGE = 32
"""The largest absolute change of a number in a round; larger ones are clipped to it."""

BITS = 32
"""Binary places of a change."""

FEWEST_SILOS, MOST_SILOS = 3, 50

MOST_WEIGHT = 2**20
"""The largest weight of a silo: rows, or units of privacy."""

SUMMAND = "summand"
"""The tensor in a silo's own message, and the blob of a kept answer that never leaves as it is."""


@dataclass(frozen=True)
class Sum:
    """The sum of the survivors' summands, int64, and their names in order.

    With it go what each silo has sent for it, and how many bytes of other silos it was shown.
    """

    total: Tensor
    survivors: list[str]
    sent: Mapping[str, bytes]
    received: Mapping[str, int]


def threshold_of(silos: int) -> int:
    """Return t, how many silos must help to take off masks: more than two thirds of the pinned list."""
    return 2 * silos // 3 + 1


def most_colluders(silos: int, least: int) -> int:
    """Return how many silos may help a lying coordinator without one silo's change coming out.

    They can neither have two survivor lists signed, nor gather both shares of a peer (2t − n − 1), and at least two
    honest silos are left in the smallest sum.
    """
    return min(2 * threshold_of(silos) - silos - 1, least - 2)


def require_masks(silos: int, least: int | None = None, colluders: int = 1) -> None:
    """Refuse so many silos that sums could leave 64 bits, so few that a sum hides none, and missing packages.

    `least` and `colluders` are those of the section `aggregation`.
    """
    with needs("aggregation.secure: needs cryptography and pycryptodome", "federation"):
        import_module("cryptography")
        import_module("Crypto")
    if not FEWEST_SILOS <= silos <= MOST_SILOS:
        raise InputError(
            f"aggregation.secure: {silos} silos; sums under masks are of {FEWEST_SILOS} to {MOST_SILOS} silos"
        )
    fewest = least or threshold_of(silos)
    if not threshold_of(silos) <= fewest <= silos:
        raise InputError(f"aggregation.least: must be between {threshold_of(silos)} and {silos} (got {least})")
    if colluders > (most := most_colluders(silos, fewest)):
        raise InputError(
            f"aggregation.colluders: at most {most} of {silos} silos, in sums of {fewest} (got {colluders})"
        )


def summand(change: Iterable[tuple[str, Tensor]], weight: int, seed: int, silo: str, number: int) -> Tensor:
    """Return a silo's summand of a round, int64, from its finite change; the same change has the same bits."""
    pieces = [torch.ones(1, dtype=torch.int64)]
    for name, tensor in sorted(change):
        chance = torch.rand(tensor.shape, dtype=torch.float64, generator=generator(seed, "sum", silo, number, name))
        scaled = tensor.detach().cpu().double().clamp(-RANGE, RANGE) * 2**BITS
        pieces.append((scaled + chance).floor().to(torch.int64).reshape(-1))
    return torch.cat(pieces) * weight


def summand_message(change: Sequence[tuple[str, Tensor]], weight: int, seed: int, silo: str, number: int) -> bytes:
    """Return a silo's summand as the message that it keeps until it is masked; empty if the change diverged."""
    if not all(bool(torch.isfinite(tensor).all()) for _, tensor in change):
        return b""
    return tensor_bytes({SUMMAND: summand(change, weight, seed, silo, number)})


def read_summand(message: bytes) -> Tensor:
    """Return the summand in a silo's own message."""
    return read_tensors(message)[SUMMAND]


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
