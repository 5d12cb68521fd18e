"""How alike two sets of representations are: linear CKA over HSIC (FedMCP eqs. 6-7), cosine, MOON's contrast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

MINIMUM_ROWS = 4
"""Below this many rows CKA says nothing (two centered points are always aligned): it is then 0, without gradient."""


def hsic(x: Tensor, y: Tensor) -> Tensor:
    """`tr(K·H·L·H) / (n − 1)²` with K = x·xᵀ, L = y·yᵀ and H the centring matrix (FedMCP eq. 7).

    Computed as `‖xᶜᵀ·yᶜ‖² / (n − 1)²` with columns centered, which is the same number.

    Args:
        x: shape (n, p).
        y: shape (n, q).
    """
    x, y = x - x.mean(0), y - y.mean(0)
    return (x.mT @ y).square().sum() / (len(x) - 1) ** 2


def cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear centered kernel alignment in [0, 1] (FedMCP eq. 6), scalar. 0 for fewer than `MINIMUM_ROWS` rows."""
    if len(x) < MINIMUM_ROWS:
        return x.new_zeros(())
    # Scaling changes nothing in exact arithmetic and keeps the fourth powers in range.
    x, y = _unit(x), _unit(y)
    cross, own = hsic(x, y), hsic(x, x) * hsic(y, y)
    # The clamp comes before the root, whose gradient at 0 is not finite.
    return cross / own.clamp_min(torch.finfo(x.dtype).tiny).sqrt()


def _unit(x: Tensor) -> Tensor:
    """Columns centered, norm 1; exactly 0, without gradient, where the rows are equal up to rounding."""
    centred = x - x.mean(0)
    norm, whole = centred.detach().norm(), x.detach().norm()
    limits = torch.finfo(x.dtype)
    alike = norm <= 8 * limits.eps * whole
    return torch.where(alike, 0.0, centred / norm.clamp_min(limits.tiny))


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Mean over rows of the cosine between the rows of x and y (FedMCP, Figure 4), scalar."""
    return nn.functional.cosine_similarity(x, y, dim=-1).mean()


SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cka": cka, "cosine": cosine}


def model_contrast(z: Tensor, positive: Tensor, negative: Tensor, tau: float) -> Tensor:
    """`−log( e^{sim(z, z⁺)/τ} / (e^{sim(z, z⁺)/τ} + e^{sim(z, z⁻)/τ}) )`, mean over rows; sim: cosine (FedFAME eq. 2).

    Args:
        z: shape (rows, width), and so the other two.
        positive: toward which z is pulled.
        negative: from which it is pushed.
        tau: the temperature.
    """
    similar = nn.functional.cosine_similarity(z, positive, dim=-1) / tau
    unlike = nn.functional.cosine_similarity(z, negative, dim=-1) / tau
    return (torch.logaddexp(similar, unlike) - similar).mean()
