"""Read one row's gradient from a pass whose last batch holds that row alone.

With 57 rows and eight a step, the 57th row weighs as much as eight others. Who knows the order knows which row it was;
the part of an update that differs from round to round is that row's gradient.
"""

from __future__ import annotations

import torch

from benchmarks.leakage.one_silo import OneSilo, demo, private
from silotune.core.randomness import generator
from silotune.training.federation import Federation

ROWS, ROUNDS = 57, 8


def measure(seed: int) -> dict[str, float]:
    """Return the cosines of updates with the last rows' gradients, for full and for even batches."""
    full, even = (attack(demo(seed, f"train.batches={kind}"), ROWS, ROUNDS) for kind in ("full", "even"))
    noised = attack(demo(seed, *private(ROUNDS)), ROWS, ROUNDS)
    even = {f"even batches, {key}": value for key, value in even.items()}
    return full | even | {f"private, {key}": value for key, value in noised.items()}


def attack(federation: Federation, count: int, rounds: int) -> dict[str, float]:
    """Return the mean and the least cosine over rounds, each less what all rounds have in common."""
    silo, seed = OneSilo.of(federation, count), federation.config.seed
    phase, shared = federation.context.phases[0].name, silo.start(add=0.1)
    numbers = range(1, rounds + 1)
    changes = torch.stack([silo.change(shared, number) for number in numbers])
    orders = [generator(seed, "batches", silo.name, number, phase, 0) for number in numbers]
    own = silo.gradients(shared, [int(torch.randperm(count, generator=order)[-1]) for order in orders])
    similar = torch.cosine_similarity(changes - changes.mean(0), own - own.mean(0))
    return {"mean cosine": float(similar.mean()), "least cosine": float(similar.min())}
