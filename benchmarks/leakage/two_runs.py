"""Subtract two runs that differ by one optimizer step: the difference is the gradient of that step's batch."""

from __future__ import annotations

import torch

from benchmarks.leakage.one_silo import OneSilo, demo, private
from silotune.core.randomness import generator
from silotune.training.federation import Federation

ROWS = 60


def measure(seed: int) -> dict[str, float]:
    """Return the cosine of the difference with the gradient of the seventh batch."""
    plain = attack(demo(seed, "train.steps=6"), demo(seed, "train.steps=7"), ROWS)
    words = private(1)
    noised = attack(demo(seed, "train.steps=6", *words), demo(seed, "train.steps=7", *words), ROWS)
    return plain | {f"private, {key}": value for key, value in noised.items()}


def attack(shorter: Federation, longer: Federation, count: int) -> dict[str, float]:
    """Return how alike the difference of two updates and the extra step's own change are."""
    first, second = (OneSilo.of(federation, count) for federation in (shorter, longer))
    shared, train = first.start(add=0.1), shorter.context.train
    difference = second.change(shared) - first.change(shared)
    draws = generator(shorter.config.seed, "batches", first.name, 1, shorter.context.phases[0].name, 0)
    batches = torch.randperm(count, generator=draws).split(train.batch_size)
    batch = batches[train.steps or 0].tolist()
    alone = first.gradients(shared, batch).mean(0)
    return {"cosine": float(torch.cosine_similarity(difference, alone, dim=0))}
