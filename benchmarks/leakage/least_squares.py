"""Solve many rounds of one broadcast for single rows' gradients, by least squares over the known orders of rows.

Whoever knows the seed knows which rows shared a batch in which round, and so with which weight each row enters an
update: as many rounds as rows are as many equations. The coordinator here believes in the seed's order. Against a silo
that draws the order from a secret of its own, the same equations are wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.leakage.one_silo import OneSilo, demo, private
from silotune.core.randomness import derive, generator
from silotune.training.federation import Federation

ROWS, ROUNDS = 60, 150


def measure(seed: int) -> dict[str, float]:
    """Return the cosines of estimated with true gradients, for an order from the seed and from a secret."""
    plain = attack(demo(seed), ROWS, ROUNDS)
    federation = demo(seed)
    federation.context.draw_seed = derive(seed, "a secret of the silo")
    secret = {f"secret order, {key}": value for key, value in attack(federation, ROWS, ROUNDS).items()}
    noised = attack(demo(seed, *private(ROUNDS)), ROWS, ROUNDS)
    return plain | secret | {f"private, {key}": value for key, value in noised.items()}


def attack(federation: Federation, count: int, rounds: int) -> dict[str, float]:
    """Return median and best cosine of rows' estimated with their true gradients, less the mean over rows."""
    silo, size = OneSilo.of(federation, count), federation.context.train.batch_size
    phase, seed = federation.context.phases[0].name, federation.config.seed
    shared, changes = silo.start(add=0.1), []
    weights = torch.zeros(rounds, count, dtype=torch.float64)
    for number in range(1, rounds + 1):
        changes.append(silo.change(shared, number))
        order = torch.randperm(count, generator=generator(seed, "batches", silo.name, number, phase, 0))
        for part in order.split(size):
            weights[number - 1, part] = 1 / len(part)
    estimates = torch.linalg.lstsq(weights, torch.stack(changes), driver="gelsd").solution
    similar = _centered_cosines(estimates, silo.gradients(shared, range(count)))
    return {"median cosine": float(similar.median()), "best cosine": float(similar.max())}


def _centered_cosines(estimates: Tensor, true: Tensor) -> Tensor:
    return torch.cosine_similarity(estimates - estimates.mean(0), true - true.mean(0))
