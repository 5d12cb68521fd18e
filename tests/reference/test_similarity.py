"""CKA, HSIC and cosine against independent NumPy code and a published definition."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from silotune.methods.similarity import cka, cosine, hsic, unbiased_cka, unbiased_hsic
from tests.support import by_hand

DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-12)]
SHAPES = [(4, 3, 3), (5, 16, 2), (16, 32, 32), (64, 8, 24), (7, 1, 1)]


def pair(n: int, p: int, q: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, p)) + draws.normal(size=p)
    mixed = x @ draws.normal(size=(p, q))
    return x, 0.5 * mixed + draws.normal(size=(n, q)) + 3.0


def tensors(dtype: torch.dtype, *given: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=dtype) for x in given]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_hsic_and_cka_are_the_papers_and_cka_the_published_one(shape, dtype, tolerance):
    x, y = pair(*shape)
    assert float(hsic(*tensors(dtype, x, y))) == pytest.approx(by_hand.hsic(x, y), rel=tolerance)
    for seed in range(5):
        x, y = pair(*shape, seed=seed)
        value = float(cka(*tensors(dtype, x, y)))
        assert value == pytest.approx(by_hand.cka(x, y), rel=tolerance)
        assert value == pytest.approx(by_hand.kornblith(x, y), rel=tolerance)
        assert 0 <= value <= 1 + tolerance


def test_unbiased_hsic_is_the_mean_over_distinct_rows():
    """The U-statistic over all four distinct rows: K_ij·L_ij + K_ij·L_qr − 2·K_ij·L_iq."""
    x, y = pair(6, 4, 3)
    k, m = x @ x.T, y @ y.T
    terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(6), 4)]
    assert float(unbiased_hsic(*tensors(torch.float64, x, y))) == pytest.approx(np.mean(terms), rel=1e-10)


def test_unbiased_cka_of_independent_wide_rows_is_near_zero():
    draws = np.random.default_rng(3)
    values = [
        [float(f(*tensors(torch.float64, *draws.normal(size=(2, 16, 384))))) for f in (cka, unbiased_cka)]
        for _ in range(50)
    ]
    usual, unbiased = np.mean(values, 0)
    assert usual > 0.95
    assert abs(unbiased) < 0.02
    (x,) = tensors(torch.float64, draws.normal(size=(16, 5)))
    assert float(unbiased_cka(x, 3 * x)) == pytest.approx(1, abs=1e-12)
    assert float(unbiased_cka(x, torch.ones_like(x))) == 0


def test_cka_is_higher_for_similar_representations():
    draws = np.random.default_rng(1)
    x, other = draws.normal(size=(400, 4)), draws.normal(size=(400, 4))
    (a, b) = tensors(torch.float64, x, other)
    assert float(cka(a, a)) == pytest.approx(1, abs=1e-12)
    assert float(cka(a, b)) < 0.05
    x1 = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
    x2 = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)
    assert float(cka(x1, x2)) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_cka_ignores_rotation_scaling_and_shift(dtype, tolerance):
    x, y = pair(24, 6, 9)
    draws = np.random.default_rng(2)
    turn_x, turn_y = (np.linalg.qr(draws.normal(size=(k, k)))[0] for k in (6, 9))
    value = float(cka(*tensors(dtype, x, y)))
    for changed_x, changed_y in [(x @ turn_x, y @ turn_y), (1e-6 * x, 1e6 * y), (x + 5, y - 2), (y, x)]:
        args = (changed_x, changed_y)
        assert float(cka(*tensors(dtype, *args))) == pytest.approx(value, rel=10 * tolerance)
    # ... and is not invariant to just any linear map (Kornblith et al. 2019, section 2)
    stretched = x @ np.diag([100.0, 1, 1, 1, 1, 1])
    assert abs(float(cka(*tensors(dtype, stretched, y))) - value) > 0.01


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_float32_survives_fourth_powers(scale):
    x, y = pair(32, 8, 8)
    assert float(cka(*tensors(torch.float32, scale * x, scale * y))) == pytest.approx(by_hand.cka(x, y), rel=2e-5)


@pytest.mark.parametrize(("dtype", "_tolerance"), DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_too_few_rows_give_zero_without_gradient(n, dtype, _tolerance):
    x, y = (tensor.requires_grad_() for tensor in tensors(dtype, *pair(n, 5, 5)))
    value = cka(x, y)
    assert float(value.detach()) == 0
    total = 0.05 * value + x.sum() * 2
    total.backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert y.grad is None or not y.grad.any()


@pytest.mark.parametrize(("dtype", "_tolerance"), DTYPES)
@pytest.mark.parametrize("constant", [0.0, 0.1, -3.7, 1e4])
@pytest.mark.parametrize("both", [False, True])
def test_equal_rows_give_no_nan(constant, both, dtype, _tolerance):
    x = torch.full((13, 5), constant, dtype=dtype).requires_grad_()
    y = (x.detach().clone() if both else tensors(dtype, *pair(13, 5, 5))[1]).requires_grad_()
    value = cka(x, y)
    value.backward()
    assert 0 <= float(value.detach()) <= 1
    for tensor in (x, y):
        assert tensor.grad is None or tensor.grad.isfinite().all()
        assert tensor.grad is None or tensor.grad.abs().max() < 1e3  # rounding noise is not a direction to learn


def test_gradient_of_cka():
    x, y = (tensor.requires_grad_() for tensor in tensors(torch.float64, *pair(9, 4, 3)))
    assert torch.autograd.gradcheck(cka, (x, y), eps=1e-6, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_cosine_is_the_mean_over_rows(dtype, tolerance):
    x, y = pair(11, 6, 6)
    assert float(cosine(*tensors(dtype, x, y))) == pytest.approx(by_hand.cosine(x, y), rel=tolerance)
    assert float(cosine(*tensors(dtype, x, -3 * x))) == pytest.approx(-1, rel=tolerance)
    x[3] = 0  # a zero vector has no direction
    a, b = (tensor.requires_grad_() for tensor in tensors(dtype, x, y))
    value = cosine(a, b)
    value.backward()
    assert value.isfinite()
    assert a.grad.isfinite().all()
    assert b.grad.isfinite().all()
