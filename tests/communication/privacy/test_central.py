"""Noise on the coordinator's mean: how much, on what, and that one silo moves it by no more than is said."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from silotune.aggregation import Update
from silotune.communication.privacy.noise import CentralNoise
from silotune.runs.build.builder import build
from silotune.training.coordinator import Coordinator

SHAPES = {"global/w": (100, 300), "global/b": (10_000,)}
COUNT = 40_000


def before() -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in SHAPES.items()}


def updates(count: int, spread: float = 1.0) -> list[Update]:
    draws = np.random.default_rng(5)
    return [
        Update(
            f"silo{number}",
            {name: torch.tensor(1 + spread * draws.normal(size=s), dtype=torch.float32) for name, s in SHAPES.items()},
            int(draws.integers(1, 99)),
        )
        for number in range(count)
    ]


def flat(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(SHAPES)])


def mean_of_clipped(found: list[Update], clip: float, silos: int) -> np.ndarray:
    changes = [flat(update.tensors) - flat(before()) for update in found]
    return sum(change * min(1, clip / np.linalg.norm(change)) for change in changes) / silos


@pytest.mark.parametrize("arrived", [4, 3, 0])
def test_it_is_the_mean_of_clipped_changes_plus_gaussian_noise(arrived):
    """Divided by the silos of a round, not by those that answered; a round without answers is noised as well."""
    clip, multiplier, silos = 2.0, 1.5, 4
    noise = CentralNoise(multiplier, clip, silos, seed=1)
    found = flat(noise(before(), updates(arrived), 1)) - flat(before())
    deviation = multiplier * clip / silos
    left = found - (mean_of_clipped(updates(arrived), clip, silos) if arrived else 0)
    assert stats.kstest(left, stats.norm(scale=deviation).cdf).pvalue > 1e-3
    assert left.std() == pytest.approx(deviation, rel=4 / math.sqrt(2 * COUNT))


def test_replacing_one_silos_rows_moves_the_mean_by_twice_the_bound_over_the_silos():
    clip, silos = 2.0, 4
    still = CentralNoise(1e-12, clip, silos, seed=1)
    found = updates(4)
    opposite = {name: 1 - 1000 * (tensor - 1) for name, tensor in found[0].tensors.items()}
    one = flat(still(before(), found, 1))
    other = flat(still(before(), [Update("silo0", opposite, 3), *found[1:]], 1))
    assert np.linalg.norm(one - other) == pytest.approx(2 * clip / silos, rel=1e-4)


def test_the_coordinator_uses_it_and_each_round_has_its_own():
    shared = {"global": {"w": torch.ones(100, 300), "b": torch.ones(10_000)}}
    noise = CentralNoise(1.0, 1.0, 2, seed=1)
    after = []
    for number in (1, 1, 2):
        coordinator = Coordinator(shared, noise)
        coordinator.aggregate(updates(2), number)
        after.append(np.concatenate([coordinator.shared["global"][name].numpy().ravel() for name in ("b", "w")]))
    np.testing.assert_array_equal(after[0], after[1])
    assert np.corrcoef(after[0], after[2])[0, 1] < 4.5 / math.sqrt(COUNT) + 0.01
    assert not np.isclose(after[0], after[2]).all()
    with pytest.raises(AssertionError):
        Coordinator(shared, noise).aggregate(updates(2))


def test_with_a_secret_it_decides_who_takes_part(tiny_config, tmp_path):
    """The bound for sampling supposes that silos, who know the seed, cannot tell."""
    words = (
        "fedavg",
        "aggregation=uniform",
        "aggregation.clip=1",
        "aggregation.noise_multiplier=1",
        "sampling.count=1",
    )

    def chosen(*more: str) -> list[list[str]]:
        federation = build(tiny_config(*words, *more))
        return [federation.coordinator.choose(number, sorted(federation.silos)) for number in range(1, 13)]

    (tmp_path / "one").write_bytes(b"1" * 32)
    (tmp_path / "two").write_bytes(b"2" * 32)
    plain, one, two = (
        chosen(),
        chosen(f"privacy.secret={tmp_path / 'one'}"),
        chosen(f"privacy.secret={tmp_path / 'two'}"),
    )
    assert one == chosen(f"privacy.secret={tmp_path / 'one'}")
    assert len({str(found) for found in (plain, one, two)}) == 3
