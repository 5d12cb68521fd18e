"""Uniform and sample-weighted aggregation by hand; arrival order changes no bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from silotune.aggregation import AGGREGATIONS, Update, by_samples, in_name_order, uniform
from silotune.core.tensors import digest, flatten, unflatten
from silotune.training.coordinator import Coordinator

SHAPES = {"global/w": (7, 5), "global/b": (5,), "other/s": ()}
ROWS = {"delta": 3, "alpha": 1000, "charlie": 17, "bravo": 250, "echo": 1}


def updates(dtype=torch.float32):
    draws = np.random.default_rng(0)
    return [
        Update(
            silo, {name: torch.tensor(draws.normal(size=shape), dtype=dtype) for name, shape in SHAPES.items()}, rows
        )
        for silo, rows in ROWS.items()
    ]


def mean_by_hand(found, weights):
    """`Σ w·θ / Σ w` in float64, silo by silo."""
    total = float(sum(weights[update.silo] for update in found))
    return {
        name: sum(weights[update.silo] / total * update.tensors[name].double().numpy() for update in found)
        for name in SHAPES
    }


WEIGHTS = {"uniform": dict.fromkeys(ROWS, 1), "samples": ROWS}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-15)])
def test_mean_by_hand(name, dtype, tolerance):
    found = updates(dtype)
    expected = mean_by_hand(found, WEIGHTS[name])
    mean = AGGREGATIONS[name](found)
    assert mean.keys() == SHAPES.keys()
    for key, shape in SHAPES.items():
        assert mean[key].dtype is dtype
        assert tuple(mean[key].shape) == shape
        np.testing.assert_allclose(mean[key].numpy(), expected[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", WEIGHTS)
def test_one_update_and_equal_updates_are_kept_exactly(name):
    (first, *_) = updates()
    assert digest(AGGREGATIONS[name]([first])) == digest(first.tensors)
    alike = [Update(str(number), first.tensors, 1000 + number) for number in range(9)]
    assert digest(AGGREGATIONS[name](alike)) == digest(first.tensors)


@pytest.mark.parametrize("name", WEIGHTS)
def test_small_differences_survive_in_float32(name):
    """Sums are in float64: a float32 sum of a hundred updates would lose their small differences."""
    found = [Update(f"s{number:03d}", {"w": torch.tensor([1.0 + number * 2.0**-20])}, 1) for number in range(100)]
    expected = np.float32(np.mean([1.0 + number * 2.0**-20 for number in range(100)]))
    assert AGGREGATIONS[name](found)["w"].numpy()[0] == expected


def cancelling_updates(weights):
    """Two silos cancel each other under the weights, so float64 sums depend on the order of summation."""
    draws = np.random.default_rng(3)
    large = 2.0**30 * draws.integers(1, 9, size=20)
    values = {silo: draws.normal(size=20) for silo in ROWS}
    values["delta"], values["charlie"] = large * weights["charlie"], -large * weights["delta"]
    return [
        Update(silo, {"global/w": torch.tensor(value, dtype=torch.float32)}, ROWS[silo])
        for silo, value in values.items()
    ]


@pytest.mark.parametrize("name", WEIGHTS)
def test_arrival_order_changes_no_bit(name):
    found = cancelling_updates(WEIGHTS[name])
    digests, unsorted = set(), set()
    for order in itertools.permutations(found):
        coordinator = Coordinator(unflatten(found[0].tensors), AGGREGATIONS[name])
        coordinator.aggregate(order)
        digests.add(digest(flatten(coordinator.shared)))
        unsorted.add(digest(AGGREGATIONS[name](list(order))))
    assert len(digests) == 1
    assert len(unsorted) > 1  # these tensors would tell


def test_without_updates_the_shared_parts_stay():
    shared = unflatten(updates()[0].tensors)
    coordinator = Coordinator(shared, AGGREGATIONS["uniform"])
    coordinator.aggregate([])
    assert digest(flatten(coordinator.shared)) == digest(flatten(shared))


def test_updates_are_passed_on_in_name_order_and_not_kept():
    """Updates in order pass at once; a missing silo delays the later ones, and none is lost."""
    arrived: list[str] = []

    def arriving(names):
        for name in names:
            arrived.append(name)
            yield Update(name, {"x": torch.ones(1)}, 1)

    passed = in_name_order(arriving(["a", "b", "c"]), ["c", "b", "a"])
    assert [(next(passed).silo, list(arrived)) for _ in range(3)] == [
        ("a", ["a"]),
        ("b", ["a", "b"]),
        ("c", ["a", "b", "c"]),
    ]
    for order in (["c", "a", "d"], ["d", "c", "a"], ["a", "c", "d"]):  # b never comes
        assert [update.silo for update in in_name_order(arriving(order), ["a", "b", "c", "d"])] == ["a", "c", "d"]


def test_the_mean_of_a_stream_has_the_bits_of_the_mean_of_a_list():
    draws = torch.Generator().manual_seed(3)
    drawn = [Update(f"{n:03d}", {"x": torch.randn(7, generator=draws)}, 1 + n) for n in range(40)]
    shared = {"global": {"x": torch.zeros(7)}}
    named = [Update(update.silo, {"global/x": update.tensors["x"]}, update.rows) for update in drawn]
    for aggregation in (uniform, by_samples):
        listed, streamed = Coordinator(shared, aggregation), Coordinator(shared, aggregation)
        listed.aggregate(named[::-1])
        streamed.aggregate(update for update in named)
        assert torch.equal(listed.shared["global"]["x"], streamed.shared["global"]["x"])
