"""Similarities of representations (CKA over HSIC, FedMCP eqs. 6-7; cosine) and the losses made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

MINIMUM_ROWS = 4
"""With fewer rows CKA is 0, without gradient: two centered points are always aligned."""


def hsic(x: Tensor, y: Tensor) -> Tensor:
    """Return `tr(K·H·L·H) / (n − 1)²` with K = x·xᵀ, L = y·yᵀ and H the centering matrix (FedMCP eq. 7).

    Computed as the equal `‖xᶜᵀ·yᶜ‖² / (n − 1)²` with centered columns.

    Args:
        x: shape (n, p).
        y: shape (n, q).

    Returns:
        Shape ().
    """
    x, y = x - x.mean(0), y - y.mean(0)
    return (x.mT @ y).square().sum() / (len(x) - 1) ** 2


def cka(x: Tensor, y: Tensor) -> Tensor:
    """Return the linear centered kernel alignment in [0, 1] (FedMCP eq. 6), shape (); 0 below `MINIMUM_ROWS` rows."""
    if len(x) < MINIMUM_ROWS:
        return x.new_zeros(())
    # Scaling changes nothing in exact arithmetic and keeps the fourth powers in range.
    x, y = _unit(x), _unit(y)
    cross, squared_norms = hsic(x, y), hsic(x, x) * hsic(y, y)
    # The clamp comes before the root, whose gradient at 0 is not finite.
    return cross / squared_norms.clamp_min(torch.finfo(x.dtype).tiny).sqrt()


def unbiased_hsic(x: Tensor, y: Tensor) -> Tensor:
    """Return the unbiased estimate of HSIC (Song et al. 2012, eq. 5), shape (); x and y as for `hsic`, of 4 rows up."""
    rows = len(x)
    k, m = (each @ each.mT - torch.diag(each.square().sum(1)) for each in (x, y))
    sums = k.sum() * m.sum() / ((rows - 1) * (rows - 2))
    mixed = 2 * (k.sum(0) @ m.sum(1)) / (rows - 2)
    return ((k * m.mT).sum() + sums - mixed) / (rows * (rows - 3))


def unbiased_cka(x: Tensor, y: Tensor) -> Tensor:
    """Return CKA over `unbiased_hsic`, shape (); 0 below `MINIMUM_ROWS` rows.

    The usual estimate is near 1 for independent representations much wider than a batch: 0.96 for 16 isotropic rows of
    384 numbers. This one is near 0 for them, may be negative, and is 0 where a norm's estimate is not positive.
    """
    if len(x) < MINIMUM_ROWS:
        return x.new_zeros(())
    x, y = _unit(x), _unit(y)
    norms = unbiased_hsic(x, x).clamp_min(0) * unbiased_hsic(y, y).clamp_min(0)
    least = torch.finfo(x.dtype).tiny
    return torch.where(norms > least, unbiased_hsic(x, y) / norms.clamp_min(least).sqrt(), 0.0)


def _unit(x: Tensor) -> Tensor:
    """Center the columns and scale to norm 1; exactly 0, without gradient, if all rows are equal up to rounding."""
    centered = x - x.mean(0)
    norm, whole = centered.detach().norm(), x.detach().norm()
    limits = torch.finfo(x.dtype)
    alike = norm <= 8 * limits.eps * whole
    return torch.where(alike, 0.0, centered / norm.clamp_min(limits.tiny))


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over rows of the cosine of x's and y's rows (FedMCP, Figure 4), shape ()."""
    return row_cosine(x, y).mean()


SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cka": cka,
    "cka-unbiased": unbiased_cka,
    "cosine": cosine,
}


RowSimilarity = Callable[[Tensor, Tensor], Tensor]
"""Two tensors of shape (rows, width) → the similarities of their rows, shape (rows,)."""


def row_cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine of x's and y's rows, shape (rows,); in general, over the last dimension."""
    return nn.functional.cosine_similarity(x, y, dim=-1)


def row_cosine_by_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the same as `row_cosine`, as `1 − ½·‖x/‖x‖ − y/‖y‖‖²`; where rows are equal, the gradient is exactly 0.

    The cosine is at its maximum there, and its usual gradient is a difference of equal terms: rounding.
    """
    return 1 - (nn.functional.normalize(x, dim=-1) - nn.functional.normalize(y, dim=-1)).square().sum(-1) / 2


def model_contrast(
    z: Tensor, positive: Tensor, negative: Tensor, tau: float, similarity: RowSimilarity = row_cosine
) -> Tensor:
    """Return `−log( e^{sim(z, z⁺)/τ} / (e^{sim(z, z⁺)/τ} + e^{sim(z, z⁻)/τ}) )`, mean over rows, shape ().

    FedFAME eq. 2; sim is the cosine.

    Args:
        z: shape (rows, width).
        positive: what z is pulled toward, shape (rows, width).
        negative: what z is pushed from, shape (rows, width).
        tau: the temperature.
        similarity: how the cosine is computed.
    """
    similar, unlike = similarity(z, positive) / tau, similarity(z, negative) / tau
    return (torch.logaddexp(similar, unlike) - similar).mean()


def distillation(logits: Tensor, teacher: Tensor, exact: bool = True) -> Tensor:
    """Return the cross-entropy of logits toward a teacher's classes, `−Σ_c p_t(c)·log p(c)`, mean over rows, shape ().

    FedFAME eq. 3. The gradient is `p − p_t`, exactly 0 where both are equal; autograd's own is rounding there.

    Args:
        logits: shape (rows, classes).
        teacher: logits of the teacher, a constant, shape (rows, classes).
        exact: whether the gradient is computed as that difference; otherwise autograd computes it.
    """
    targets, constant = teacher.detach().softmax(-1), logits.detach()
    if not exact:
        return nn.functional.cross_entropy(logits, targets)
    gradient = constant.softmax(-1) - targets
    value = nn.functional.cross_entropy(constant, targets)
    return value + (gradient * (logits - constant)).sum(-1).mean()
