"""Aggregations of LoRA's pairs against dense NumPy: `W̄ = Σ n_k·B_k·A_k / Σ n_k` and its decomposition."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from silotune.aggregation import Update, by_samples, uniform
from silotune.aggregation.factor_pairs import DELTA, Pair, factor_pairs
from silotune.aggregation.product_error import ProductError
from silotune.core.tensors import unflatten
from silotune.errors import InputError
from silotune.methods.lora_products import FactorSVD, ProductSVD
from silotune.training.coordinator import Coordinator
from tests.support.method_cases import logged

RANK, OUT, IN = 3, 7, 11
MODULES = ("block.0.query", "block.0.value")


def pair(module, part="global"):
    return f"{part}/{module}.lora_A.weight", f"{part}/{module}.lora_B.weight"


def made_updates(silos=4, dtype=torch.float64, seed=3, out=OUT, inputs=IN):
    draws = torch.Generator().manual_seed(seed)
    updates = []
    for number in range(silos):
        tensors = {"head/out.weight": torch.randn(2, OUT, generator=draws, dtype=dtype)}
        for module in MODULES:
            a, b = pair(module)
            tensors[a] = torch.randn(RANK, inputs, generator=draws, dtype=dtype)
            tensors[b] = torch.randn(out, RANK, generator=draws, dtype=dtype)
        updates.append(Update(f"silo{number}", tensors, rows=3 + 5 * number))
    return updates


def mean_product(updates, module, weights):
    a, b = pair(module)
    products = [
        w * update.tensors[b].numpy() @ update.tensors[a].numpy() for w, update in zip(weights, updates, strict=True)
    ]
    return sum(products) / sum(weights)


def test_flexlora_is_the_best_approximation_of_the_mean_product():
    updates = made_updates()
    aggregate = ProductSVD().aggregate(iter(updates), updates[0].tensors)
    for module in MODULES:
        mean = mean_product(updates, module, [update.rows for update in updates])
        u, values, vt = np.linalg.svd(mean)
        best = (u[:, :RANK] * values[:RANK]) @ vt[:RANK]
        a, b = (aggregate[name].numpy() for name in pair(module))
        np.testing.assert_allclose(b @ a, best, atol=1e-9)
        np.testing.assert_allclose(a @ a.T, np.eye(RANK), atol=1e-9)
        np.testing.assert_allclose(np.linalg.norm(b, axis=0), values[:RANK], atol=1e-9)
        assert (a[range(RANK), np.abs(a).argmax(1)] > 0).all()  # so that signs are the same everywhere
        assert np.linalg.norm(b @ a - mean) > 0.1  # the rank does cut something off
    head = by_samples(updates)["head/out.weight"]
    assert torch.equal(aggregate["head/out.weight"], head)


def test_fedsvd_keeps_the_product_of_the_mean_and_makes_a_orthonormal():
    updates = made_updates()
    before = updates[0].tensors
    sent = [
        Update(update.silo, {n: t for n, t in update.tensors.items() if "lora_A" not in n}, update.rows)
        for update in updates
    ]
    aggregate = FactorSVD().aggregate(iter(sent), before)
    rows = np.array([update.rows for update in updates], dtype=float)
    for module in MODULES:
        a, b = pair(module)
        mean_b = sum(n * update.tensors[b].numpy() for n, update in zip(rows, updates, strict=True)) / rows.sum()
        np.testing.assert_allclose(aggregate[b].numpy() @ aggregate[a].numpy(), mean_b @ before[a].numpy(), atol=1e-9)
        np.testing.assert_allclose(aggregate[a].numpy() @ aggregate[a].numpy().T, np.eye(RANK), atol=1e-9)


SIZES = pytest.mark.parametrize(("out", "inputs"), [(OUT, IN), (53, 59)], ids=["", "thin"])
"""Factors of four silos that are not, and are, so thin that no product is made (`is_thin`)."""


@SIZES
@pytest.mark.parametrize(("aggregation", "by_rows"), [(by_samples, True), (uniform, False)])
def test_the_product_error_of_a_mean(aggregation, by_rows, out, inputs):
    updates = made_updates(out=out, inputs=inputs)
    error = ProductError(updates[0].tensors, by_rows)
    aggregate = aggregation(error.watch(updates))
    weights = [update.rows if by_rows else 1 for update in updates]
    difference = size = 0.0
    for module in MODULES:
        mean = mean_product(updates, module, weights)
        a, b = (aggregate[name].numpy() for name in pair(module))
        difference += np.linalg.norm(mean - b @ a) ** 2
        size += np.linalg.norm(mean) ** 2
    assert error.of(aggregate) == pytest.approx((difference / size) ** 0.5, rel=1e-9)
    assert error.of(aggregate) > 0.1


@SIZES
def test_what_is_added_to_the_frozen_weights_counts_toward_the_product(out, inputs):
    """A delta that holds half of what the means of A and B lack leaves half of the error."""
    updates, delta = made_updates(out=out, inputs=inputs), "delta/{}" + DELTA
    zeros = {delta.format(module): torch.zeros(out, inputs, dtype=torch.float64) for module in MODULES}
    error = ProductError(updates[0].tensors | zeros, True)
    aggregate = by_samples(error.watch(updates))
    whole, halves = error.of(aggregate), {}
    for module in MODULES:
        a, b = (aggregate[name].numpy() for name in pair(module))
        lacking = mean_product(updates, module, [update.rows for update in updates]) - b @ a
        halves[delta.format(module)] = torch.from_numpy(lacking / 2)
    assert whole > 0.1
    assert error.of(aggregate | halves) == pytest.approx(whole / 2, rel=1e-9)


def test_the_product_error_is_zero_where_one_factor_is_common_and_none_where_nothing_is_sent():
    updates = made_updates()
    before = updates[0].tensors
    only_b = [
        Update(update.silo, {n: t for n, t in update.tensors.items() if "lora_B" in n}, update.rows)
        for update in updates
    ]
    error = ProductError(before, True)
    assert error.of(by_samples(error.watch(only_b))) < 1e-7
    error = ProductError(before, True)
    heads = [Update(u.silo, {"head/out.weight": u.tensors["head/out.weight"]}, u.rows) for u in updates]
    assert error.of(by_samples(error.watch(heads))) is None


def test_many_updates_have_no_product_error(monkeypatch):
    monkeypatch.setattr("silotune.aggregation.product_error.MOST_UPDATES", 3)
    updates = made_updates()
    error = ProductError(updates[0].tensors, True)
    assert len(list(error.watch(updates))) == 4
    assert error.of(updates[0].tensors) is None


@pytest.mark.parametrize(("chosen", "kept"), [(4, True), (5, False)])
def test_a_round_of_many_chosen_silos_keeps_no_update(monkeypatch, chosen, kept):
    monkeypatch.setattr("silotune.aggregation.product_error.MOST_UPDATES", 4)
    updates, factors = made_updates(silos=4), []

    def noted(arriving):
        for update in arriving:
            factors.append(weakref.ref(update.tensors[pair(MODULES[0])[0]]))
            yield update

    def mean(arriving):
        combined = by_samples(noted(arriving))
        assert (factors[1]() is not None) == kept  # the second silo's, as frames still name the first and the last
        return combined

    coordinator = Coordinator(unflatten(updates[0].tensors), mean)
    coordinator.aggregate(updates, 1, chosen=chosen)
    assert (coordinator.product_error is not None) == kept


def test_pairs_within_a_part_and_over_two_parts():
    (a, b), (other_a, other_b) = pair("q"), pair("q", "second")
    assert factor_pairs([a, b, other_a, other_b]) == [Pair(a, b), Pair(other_a, other_b)]
    assert factor_pairs(["x/q.lora_A.weight", "y/q.lora_B.weight"]) == [Pair("x/q.lora_A.weight", "y/q.lora_B.weight")]
    assert factor_pairs([a, "head/out.weight"]) == []


@pytest.mark.parametrize("aggregation", ["flexlora", "fedsvd"])
def test_shared_parts_without_pairs_are_refused_before_training(tiny_federation, aggregation):
    with pytest.raises(
        InputError, match=f"aggregation={aggregation}: the shared parts hold no pairs of LoRA's A and B"
    ):
        tiny_federation("fedavg", "tuner=bottleneck", f"aggregation={aggregation}")


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [("fedlr", 1e-4, 2), ("flexlora", 0, 2), ("rolora", 0, 1e-6), ("ffa-lora", None, None), ("fedmcp", None, None)],
)
def test_every_round_that_averages_pairs_logs_its_error(reference, case, least, most):
    """One common factor: none beyond rounding. One that is not sent (FFA's fixed A), or no LoRA at all: no event."""
    run, _ = reference(case)
    found = {event["round"]: event["product_error"] for event in logged(run.folder, "aggregation")}
    assert set(found) == (set() if least is None else {1, 2})
    assert all(least <= error <= most for error in found.values())
