"""FLoRA-NA against dense NumPy: alternating least squares over whole matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.aggregation import Update
from silotune.aggregation.factor_pairs import stacked
from silotune.methods.flora_na import SWEEPS, MixedFactors, mixed
from silotune.methods.lora_products import truncated

OUT, IN, RANK, SILOS = 7, 11, 3, 4
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def pairs(noise: float, seed: int = 5):
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    b, a = normal(OUT, RANK), normal(RANK, IN)
    return [(b + noise * normal(OUT, RANK), a + noise * normal(RANK, IN)) for _ in range(SILOS)]


def dense(factors, mean):
    """The same sweeps with one column of a dense system for each silo and rank."""
    q = {(k, j): float(WEIGHTS[k]) for k in range(SILOS) for j in range(RANK)}
    p = dict(q)
    for _ in range(SWEEPS):
        for coefficients, others, of_a in ((p, q, True), (q, p, False)):
            other = [
                sum(others[k, j] * np.array(row(factors[k], j, not of_a)) for k in range(SILOS)) for j in range(RANK)
            ]
            columns = {
                (k, j): (
                    np.outer(other[j], row(factors[k], j, True))
                    if of_a
                    else np.outer(row(factors[k], j, False), other[j])
                )
                for k, j in coefficients
            }
            system = np.stack([column.ravel() for column in columns.values()], 1)
            solved = np.linalg.lstsq(system, mean.ravel(), rcond=None)[0]
            coefficients.update(zip(columns, solved, strict=True))
    b = np.stack([sum(q[k, j] * row(factors[k], j, False) for k in range(SILOS)) for j in range(RANK)], 1)
    a = np.stack([sum(p[k, j] * row(factors[k], j, True) for k in range(SILOS)) for j in range(RANK)])
    return b @ a


def row(pair, j, of_a):
    b, a = pair
    return a[j].numpy() if of_a else b[:, j].numpy()


@pytest.mark.parametrize("noise", [0.3, 2.0])
def test_it_is_alternating_least_squares(noise):
    factors = pairs(noise)
    mean = sum(weight * b @ a for weight, (b, a) in zip(WEIGHTS, factors, strict=True))
    b, a = mixed(list(zip(WEIGHTS.tolist(), factors, strict=True)))
    np.testing.assert_allclose(b @ a, dense(factors, mean.numpy()), rtol=0, atol=1e-5)
    plain = sum(w * b for w, (b, _) in zip(WEIGHTS, factors, strict=True)) @ sum(
        w * a for w, (_, a) in zip(WEIGHTS, factors, strict=True)
    )
    best = torch.matmul(*truncated(*stacked(list(zip(WEIGHTS.tolist(), factors, strict=True))), rank=RANK))
    errors = [float((mean - product).norm()) for product in (best, b @ a, plain)]
    assert errors == sorted(errors)
    assert errors[1] < 0.99 * errors[2]


def test_equal_silos_give_back_their_factors_and_heads_are_averaged():
    b, a = pairs(1.0)[0]
    names = "global/q.lora_A.weight", "global/q.lora_B.weight", "head/out.weight"
    updates = [
        Update(f"silo{k}", dict(zip(names, (a, b, torch.full((2,), float(k))), strict=True)), 1 + k) for k in range(3)
    ]
    after = MixedFactors().aggregate(updates, dict(updates[0].tensors))
    torch.testing.assert_close(after[names[0]], a, rtol=0, atol=1e-12)
    torch.testing.assert_close(after[names[1]], b, rtol=0, atol=1e-12)
    torch.testing.assert_close(after[names[2]], torch.full((2,), (0 + 2 + 6) / 6))
