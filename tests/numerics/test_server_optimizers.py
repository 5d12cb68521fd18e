"""Server optimisers against two rounds worked by hand in NumPy (Reddi et al. 2021, Algorithm 2; Hsu et al. 2019)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.server_optimizers import ServerOptimizer

X = np.array([0.5, -1.0, 2.0])
MEANS = [np.array([0.7, -1.5, 2.0]), np.array([0.1, -0.5, 2.5])]
LR, B1, B2, TAU = 0.1, 0.9, 0.99, 1e-3


def by_hand(name: str) -> np.ndarray:
    x, m, v = X.copy(), np.zeros(3), np.full(3, TAU**2)
    for mean in MEANS:
        delta = mean - x
        if name == "avgm":
            m = B1 * m + delta
            x = x + LR * m
            continue
        m = B1 * m + (1 - B1) * delta
        square = delta**2
        if name == "adagrad":
            v = v + square
        elif name == "adam":
            v = B2 * v + (1 - B2) * square
        else:
            v = v - (1 - B2) * square * np.sign(v - square)
        x = x + LR * m / (np.sqrt(v) + TAU)
    return x


@pytest.mark.parametrize("name", ["avgm", "adam", "yogi", "adagrad"])
def test_two_rounds_by_hand(name: str) -> None:
    optimizer = ServerOptimizer(name, LR, B1, B2, TAU)
    x = {"p": torch.tensor(X)}
    for mean in MEANS:
        x = optimizer.step(x, {"p": torch.tensor(mean)})
    np.testing.assert_allclose(x["p"].numpy(), by_hand(name), rtol=1e-12)


def test_none_adopts_the_mean_exactly() -> None:
    mean = {"p": torch.rand(5)}
    assert ServerOptimizer().step({"p": torch.rand(5)}, mean)["p"] is mean["p"]


def test_none_with_a_learning_rate_goes_part_of_the_way() -> None:
    stepped = ServerOptimizer(lr=0.25).step({"p": torch.tensor([1.0])}, {"p": torch.tensor([3.0])})
    assert stepped["p"].item() == pytest.approx(1.5)
