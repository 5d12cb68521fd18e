"""Server optimizers against three rounds worked by hand in NumPy (Reddi et al. 2021, Algorithm 2; Hsu et al. 2019)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.aggregation import AGGREGATIONS, Update
from silotune.aggregation.server_optimizer import ServerOptimizer
from silotune.training.coordinator import Coordinator

X = np.array([0.5, -1.0, 2.0])
MEANS = [np.array([0.7, -1.5, 2.0]), np.array([0.1, -0.5, 2.5])]
LR, B1 = 0.1, 0.9


def test_nesterov_is_pytorchs_sgd_along_the_mean_change() -> None:
    optimizer, x = ServerOptimizer("nesterov", LR, B1), {"p": torch.tensor(X)}
    theirs = torch.tensor(X, requires_grad=True)
    sgd = torch.optim.SGD([theirs], lr=LR, momentum=B1, nesterov=True)
    for mean in MEANS:
        theirs.grad = theirs.detach() - torch.tensor(mean)
        sgd.step()
        x = optimizer.step(x, {"p": torch.tensor(mean)})
    torch.testing.assert_close(x["p"], theirs.detach(), rtol=1e-12, atol=0)


def test_none_adopts_the_mean_exactly() -> None:
    mean = {"p": torch.rand(5)}
    assert ServerOptimizer().step({"p": torch.rand(5)}, mean)["p"] is mean["p"]


def test_none_with_a_learning_rate_goes_part_of_the_way() -> None:
    stepped = ServerOptimizer(lr=0.25).step({"p": torch.tensor([1.0])}, {"p": torch.tensor([3.0])})
    assert stepped["p"].item() == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["avgm", "adam", "yogi", "adagrad"])
def test_three_rounds_at_the_coordinator_by_hand(name: str) -> None:
    """Updates are averaged by rows; m and v are kept between rounds and in checkpoints."""
    draws = np.random.default_rng(4)
    x = {"w": draws.normal(size=(3, 2)), "b": draws.normal(size=3)}
    rows, lr, b1, b2, tau = {"north": 30, "south": 10}, 0.05, 0.8, 0.95, 0.01

    def make(shared) -> Coordinator:
        optimizer = ServerOptimizer(name, lr, b1, b2, tau)
        return Coordinator(shared, AGGREGATIONS["samples"], optimizer=optimizer)

    coordinator = make({"global": {key: torch.tensor(value) for key, value in x.items()}})
    m = {key: np.zeros_like(value) for key, value in x.items()}
    v = {key: np.full_like(value, tau**2) for key, value in x.items()}
    for number in range(3):
        sent = {silo: {key: value + draws.normal(size=value.shape) for key, value in x.items()} for silo in rows}
        coordinator.aggregate(
            [Update(silo, {f"global/{k}": torch.tensor(t) for k, t in sent[silo].items()}, rows[silo]) for silo in rows]
        )
        for key in x:
            delta = (30 * sent["north"][key] + 10 * sent["south"][key]) / 40 - x[key]
            m[key] = b1 * m[key] + (1 if name == "avgm" else 1 - b1) * delta
            v[key] = {
                "avgm": v[key],
                "adagrad": v[key] + delta**2,
                "adam": b2 * v[key] + (1 - b2) * delta**2,
                "yogi": v[key] - (1 - b2) * delta**2 * np.where(v[key] > delta**2, 1, -1),
            }[name]
            x[key] = x[key] + lr * m[key] / (1 if name == "avgm" else np.sqrt(v[key]) + tau)
            np.testing.assert_allclose(coordinator.shared["global"][key].numpy(), x[key], rtol=1e-12, atol=1e-14)
        if number == 1:  # as after a kill
            kept = coordinator.flat()
            coordinator = make({"global": {key: torch.zeros_like(torch.tensor(value)) for key, value in x.items()}})
            coordinator.load_flat(kept)
