"""Add noise in whole numbers: vectors clipped and rounded to a grid, and a rounded Gaussian or Laplace number for each.

Noise in floating point tells by its low bits what it was added to (Mironov 2012). So all that noise is to hide becomes
a vector k of whole numbers, in steps of a grid, and round(X) is added to each, where X has the exact distribution:

1. k + round(X) = round(k + X), because k is whole: it follows from the output k + X of the exact mechanism.
2. `integer_vector` checks in whole numbers that k has a norm of at most C/grid, so k + X has the accountant's ε and δ.
3. int64 sums are exact in any order: without a unit they differ by its own vector alone, so C is the sensitivity.
4. Whatever is computed from round(k + X) alone (products, float32, means) tells no more (post-processing).
5. So nothing is added to δ; the assumption is that the bits of SHAKE-256 cannot be told from random ones.

No sum overflows: the grid has at most 2³⁰ steps in C, so 2³¹ vectors and their noise stay below 2⁶².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from silotune.core.tensors import Norm

_MARGIN = 1 + 2.0**-30
"""Far above the rounding of a norm summed in float64."""

_DOUBT = 2.0**-33
"""In units of the scale, a bound on the error of a number inverted in float64, unless its tail is below `_RARE`.

63 bits of a tail above `_RARE`, rounded to 53, are off by 2⁻⁴¹ of it, which moves the number by at most 1.26 times that
(Mills' ratio is at most √(π/2); for Laplace numbers 1). `ndtri` is off by 7.2e-16 and `log` by 2⁻⁵² of numbers below 17
(peak errors of Cephes' ndtri.c, which PyTorch has; libm), the product by 2⁻⁵³ of them: all together less than 2⁻⁴⁰.
"""

_RARE = 2.0**-24

_DIGITS = 50

_PI = Decimal("3.14159265358979323846264338327950288419716939937510582")


def _gaussian_tail(x: Decimal) -> Decimal:
    """Compute 1 − Φ(x) for 0 ≤ x < 14 by Abramowitz and Stegun 26.2.11, whose terms are positive; off by < 1e-46."""
    term = total = x
    odd = 1
    while odd < 2 * x * x or term > total.scaleb(-_DIGITS):  # from there on, the rest is less than the last term
        odd += 2
        term *= x * x / odd
        total += term
    return Decimal("0.5") - total * (-x * x / 2).exp() / (2 * _PI).sqrt()


@dataclass(frozen=True)
class Law:
    """A symmetric distribution of scale 1.

    Args:
        inverse: the number x ≥ 0 that is exceeded with a probability in (0, ½], float64; errors as of `_DOUBT`.
        tail: the probability that x ≥ 0 is exceeded, in the digits of the decimal context.
    """

    inverse: Callable[[Tensor], Tensor]
    tail: Callable[[Decimal], Decimal]


GAUSSIAN = Law(lambda tail: -torch.special.ndtri(tail), _gaussian_tail)
LAPLACE = Law(lambda tail: -torch.log(2 * tail), lambda x: (-x).exp() / 2)


def rounded_numbers(
    words: NDArray[np.uint64], more: Callable[[int], int], scale: float, law: Law
) -> tuple[Tensor, Tensor]:
    """Draw round(scale · X) for independent numbers X of a law, exactly, by inversion.

    Args:
        words: per number its sign, and the first 63 bits of half of its tail's probability.
        more: position → 64 further bits of a number's tail, for those too close to an edge of a cell.
        scale: at most 2²¹.
        law: of X.

    Returns:
        The numbers, int64; and the positions for which `more` was needed. Even then a number within 2⁻¹²⁸ of an edge
        stays undecided and goes to either side: a chance of less than 2⁻¹⁰⁰, and so below what SHAKE-256 leaves.
    """
    bits = words & np.uint64(2**63 - 1)
    tails = torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-64)
    numbers = scale * law.inverse(tails)
    whole = torch.floor(numbers + 0.5)
    doubtful = ((0.5 - (numbers - whole).abs() <= scale * _DOUBT) | (tails < _RARE)).nonzero().flatten()
    for place in doubtful.tolist():
        whole[place] = _decided(int(bits[place]) << 64 | more(place), scale, law)
    signs = torch.from_numpy(1 - 2 * (words >> np.uint64(63)).astype(np.int64))
    return signs * whole.long(), doubtful


def _decided(bits: int, scale: float, law: Law) -> int:
    """Round the number whose tail has these 127 bits: compare the tail with that of the closest edge of a cell."""
    with localcontext() as context:
        context.prec = _DIGITS
        tail = (bits + Decimal("0.5")) / 2**128
        below = math.floor(scale * float(law.inverse(torch.tensor(float(tail), dtype=torch.float64))))
        return below + int(tail <= law.tail((below + Decimal("0.5")) / Decimal(scale)))


def grid_of(bound: float, scale: float) -> float:
    """Return the step of whole numbers under noise of this scale: a power of two, of which it has 2¹⁹ to 2²⁰.

    Under noise of less than 2⁻¹⁰ of `bound` it is a 2³⁰th of `bound`, so that squares fit into int64.
    """
    return math.ldexp(1.0, math.frexp(max(scale, bound * 2.0**-10))[1] - 20)


def integer_vector(vector: Tensor, bound: float, grid: float, norm: Norm = "l2") -> Tensor:
    """Clip and round one vector; see `integer_vectors`."""
    return integer_vectors(vector[None], bound, grid, norm)[0]


def integer_vectors(vectors: Tensor, bound: float, grid: float, norm: Norm = "l2") -> Tensor:
    """Scale vectors, shape (vectors, numbers), to norms of at most `bound`, rounded to whole numbers of `grid`, int64.

    Rounding toward zero makes no norm larger; dividing by a power of two is exact. A vector without a finite norm
    counts as zero, and so would one whose whole numbers exceed the bound, which the margin excludes.
    """
    wide = vectors.double()
    # one by one: the bits of a sum over one dimension may depend on how many rows there are
    lengths = torch.stack([each.norm() if norm == "l2" else each.abs().sum() for each in wide])
    factors = bound / (lengths * _MARGIN).clamp(min=bound)
    whole = torch.where(lengths.isfinite()[:, None], wide * factors[:, None], 0.0).div(grid).trunc().long()
    steps = Fraction(bound) / Fraction(grid)
    sizes, most = ((whole * whole).sum(1), steps * steps) if norm == "l2" else (whole.abs().sum(1), steps)
    return whole * (sizes <= math.floor(most))[:, None]
