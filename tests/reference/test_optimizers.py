"""The optimizers of local training against NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from silotune.config import TrainConfig
from silotune.training.phase_optimizer import make_optimizer

STEPS = 4


def sgd(value: np.ndarray, gradients: Sequence[np.ndarray], lr: float) -> np.ndarray:
    return value - lr * sum(gradients)


def adam(value: np.ndarray, gradients: Sequence[np.ndarray], lr: float, decay: float = 0.0) -> np.ndarray:
    """Kingma and Ba 2015, algorithm 1; `decay`: Loshchilov and Hutter 2019, algorithm 2."""
    first = second = 0.0
    for step, gradient in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        moved = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        value = value - lr * moved - lr * decay * value
    return value


def adamw(value: np.ndarray, gradients: Sequence[np.ndarray], lr: float) -> np.ndarray:
    return adam(value, gradients, lr, decay=0.01)


def adafactor(value: np.ndarray, gradients: Sequence[np.ndarray], lr: float) -> np.ndarray:
    """Shazeer and Stern 2018: algorithm 4, a vector's second moments as they are; a constant rate for its ρ and α."""
    rows = columns = whole = 0.0
    for step, gradient in enumerate(gradients, 1):
        beta, square = 1 - step**-0.8, gradient**2 + 1e-30
        if value.ndim == 1:
            whole = beta * whole + (1 - beta) * square
            second = whole
        else:
            rows = beta * rows + (1 - beta) * square.mean(1)
            columns = beta * columns + (1 - beta) * square.mean(0)
            second = np.outer(rows, columns) / rows.mean()
        update = gradient / np.sqrt(second)
        value = value - lr * update / max(1.0, np.sqrt((update**2).mean()))
    return value


@pytest.mark.parametrize("shape", [(5, 7), (6,)])
@pytest.mark.parametrize("scale", [0.05, 10.0])
@pytest.mark.parametrize("by_hand", [sgd, adam, adamw, adafactor], ids=lambda rule: rule.__name__)
def test_it_steps_as_its_paper_says(by_hand, scale, shape):
    """The rate is constant and does not depend on the size of the parameters."""
    draws = np.random.default_rng(3)
    value = scale * draws.normal(size=shape)
    gradients = [draws.normal(size=shape) * 10.0**number for number in range(STEPS)]
    tensor = torch.tensor(value, dtype=torch.float32, requires_grad=True)
    optimizer = make_optimizer(TrainConfig(optimizer=by_hand.__name__, lr=0.3), [tensor])
    for gradient in gradients:
        tensor.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    np.testing.assert_allclose(tensor.detach().numpy(), by_hand(value, gradients, 0.3), rtol=1e-4, atol=1e-4)
