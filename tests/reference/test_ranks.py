"""FlexLoRA and HetLoRA with silos of LoRA ranks 2 and 5: whole rounds by hand in float64, and what silos receive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from silotune.aggregation import Update
from silotune.core.tensors import flatten
from silotune.methods import GLOBAL, HEAD
from silotune.methods.hetlora import NormWeightedMeans
from silotune.methods.lora_products import ProductSVD
from tests.support import silos_by_hand
from tests.support.numeric_rig import doubled, parts_in_double
from tests.support.rounds_by_hand import Stage, cross_entropy, descended, states

R, RANKS, ROWS, ALPHA = 5, {"alpha": 2, "beta": 5}, {"alpha": 6, "beta": 9}, 60.0
SETTING = ("data.tasks=[alpha,beta]", f"tuner.r={R}", "tuner.ranks.alpha=2", f"tuner.alpha={ALPHA}")
DESCENT = ("train.batch_size=64", "train.steps=2", "train.optimizer=sgd", "train.lr=0.3")
END_A, END_B = ".lora_A.weight", ".lora_B.weight"


def modules(adapter):
    return [name.removesuffix(END_A) for name in adapter if name.endswith(END_A)]


def cut(adapter, rank):
    """The first rows of A and columns of B."""
    return {name: tensor[:rank] if name.endswith(END_A) else tensor[:, :rank] for name, tensor in adapter.items()}


def svd_cut(product, rank):
    """The two factors of the best approximation of a matrix."""
    u, values, vt = np.linalg.svd(product)
    return u[:, :rank] * values[:rank], vt[:rank]


def flexlora_to_silo(adapter, rank, number):
    if number == 1:  # B is zero
        return cut(adapter, rank)
    made = {}
    for module in modules(adapter):
        b, a = svd_cut((adapter[module + END_B] @ adapter[module + END_A]).numpy(), rank)
        made |= {module + END_A: torch.from_numpy(a), module + END_B: torch.from_numpy(b)}
    return made


def flexlora_mean(adapters, rows):
    made = {}
    for module in modules(adapters[0]):
        products = [
            n * (one[module + END_B] @ one[module + END_A]).numpy() for one, n in zip(adapters, rows, strict=True)
        ]
        b, a = svd_cut(sum(products) / sum(rows), R)
        made |= {module + END_A: torch.from_numpy(a), module + END_B: torch.from_numpy(b)}
    return made


def hetlora_mean(adapters, rows, r=R):
    made = {}
    for module in modules(adapters[0]):
        weights = [np.linalg.norm((one[module + END_B] @ one[module + END_A]).numpy()) for one in adapters]
        a, b = np.zeros((r, adapters[0][module + END_A].shape[1])), np.zeros((len(adapters[0][module + END_B]), r))
        for weight, one in zip(weights, adapters, strict=True):
            rank = len(one[module + END_A])
            a[:rank] += weight / sum(weights) * one[module + END_A].numpy()
            b[:, :rank] += weight / sum(weights) * one[module + END_B].numpy()
        made |= {module + END_A: torch.from_numpy(a), module + END_B: torch.from_numpy(b)}
    return made


BY_HAND = {
    "flexlora": (flexlora_to_silo, flexlora_mean),
    "hetlora": (lambda adapter, rank, number: cut(adapter, rank), hetlora_mean),
}
"""Method → how its paper brings the shared LoRA to a silo's rank, and how it combines the silos' ones."""


@pytest.mark.parametrize("method", BY_HAND)
def test_two_rounds_of_two_silos_by_hand(tiny_federation, monkeypatch, method):
    """Factors of an SVD may be turned; what they multiply to is compared, at the coordinator and in both silos."""
    parts_in_double(monkeypatch)
    federation = doubled(tiny_federation(method, *SETTING, *DESCENT))
    coordinator, context = federation.coordinator, federation.context
    to_silo, mean = BY_HAND[method]
    shared, heads = dict(coordinator.shared[GLOBAL]), {}
    for name, silo in federation.silos.items():
        (rows,) = silo.train.values()  # few: the hand-written BERT reads one at a time
        count = ROWS[name]
        silo.train[name] = replace(rows, ids=rows.ids[:count], types=rows.types[:count], labels=rows.labels[:count])
        heads[name] = context.state_of(silo).private[HEAD]
    for number in (1, 2):
        updates, adapters = [], []
        for name, silo in federation.silos.items():
            received = coordinator.shared_of(name)
            (result,) = federation.trainer.rounds([silo], received, number)
            federation.client()._keep(silo, result)
            sent = flatten({GLOBAL: result.state[GLOBAL]})
            updates.append(Update(name, sent, silo.rows, flatten(received)))

            def loss(now, silo=silo):
                return cross_entropy(
                    federation, silo, states(federation, silo, loras=[(ALPHA / R, now[GLOBAL])]), now[HEAD]
                )

            start = {GLOBAL: to_silo(shared, RANKS[name], number), HEAD: heads[name]}
            expected = descended(start, [Stage((GLOBAL, HEAD), loss)])
            adapters.append(expected[GLOBAL])
            heads[name] = expected[HEAD]
            assert_same_products(result.state[GLOBAL], expected[GLOBAL], RANKS[name])
            torch.testing.assert_close(result.state[HEAD], expected[HEAD], atol=1e-9, rtol=0)
        coordinator.aggregate(updates, number)
        shared = mean(adapters, [ROWS[name] for name in federation.silos])
        assert_same_products(coordinator.shared[GLOBAL], shared, R)


def last_ranks(adapter, rank):
    """The size of what a silo of this rank would lose, γ being 1/2."""
    pairs = [(adapter[module + END_A], adapter[module + END_B]) for module in modules(adapter)]
    half = rank // 2
    return sum((b[:, half:rank] ** 2).sum().sqrt() * (a[half:rank] ** 2).sum().sqrt() for a, b in pairs)


@pytest.mark.parametrize(("penalty", "falls"), [(0.0, 3), (0.3, 4)])
def test_two_rounds_of_hetlora_that_prunes(tiny_federation, penalty, falls):
    """Both silos begin at rank 4; under λ both fall in both rounds, without it one of them keeps its rank once."""
    federation, wholes = silos_by_hand.set_up(
        tiny_federation, "hetlora", "aggregation=hetlora", "method.prune=0.5", f"method.penalty={penalty}"
    )
    ranks = dict.fromkeys(wholes, 4)
    for silo in federation.silos.values():  # their other parts are random
        silo.state.private["rank"] = {"value": torch.tensor(4.0, dtype=torch.float64)}
    silos_by_hand.run_rounds(federation)
    fallen = 0
    for _ in range(2):
        for name, whole in wholes.items():
            whole["global"] = with_zeros(whole["global"], ranks[name])
            before = last_ranks(whole["global"], ranks[name])

            def loss(now, name=name, rank=ranks[name]):
                cross_entropy = silos_by_hand.loss_of(federation, name, now["head"], (1, now["global"]))
                return cross_entropy + penalty * last_ranks(now["global"], rank)

            wholes[name] = whole = descended(whole, [Stage(("global", "head"), loss)])
            if last_ranks(whole["global"], ranks[name]) < before:
                ranks[name], fallen = ranks[name] // 2, fallen + 1
            whole["rank"] = {"value": torch.tensor(float(ranks[name]), dtype=torch.float64)}
            whole["global"] = with_zeros(whole["global"], ranks[name])
        mean = hetlora_mean([whole["global"] for whole in wholes.values()], [1, 1], 4)
        for name in wholes:
            wholes[name] = wholes[name] | {"global": mean}
        silos_by_hand.averaged(wholes, ("head",))
    assert fallen == falls
    silos_by_hand.assert_models(federation, wholes)


def with_zeros(adapter, rank):
    """The adapter with zeros above a rank."""
    made = {name: tensor.detach().clone() for name, tensor in adapter.items()}
    for name, tensor in made.items():
        (tensor if name.endswith(END_A) else tensor.T)[rank:] = 0
    return made


def test_hetlora_whose_ranks_never_fall_is_hetlora(tiny_federation):
    """In round 1 the last ranks begin at zero, so that nothing is taken away."""
    states = []
    for words in ((), ("method.prune=0.99",)):
        federation = tiny_federation("hetlora", "tuner.r=5", "tuner.ranks.beta=2", "train.steps=1", *words)
        silos_by_hand.run_rounds(federation, 1)
        states.append(flatten(federation.coordinator.shared))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_silo_whose_lora_did_not_change_keeps_its_rank(tiny_federation):
    federation = tiny_federation("hetlora", "tuner.r=4", "method.prune=0.5")
    draws = torch.Generator().manual_seed(5)
    lora = {f"m.{END_A}": torch.randn(4, 6, generator=draws), f"m.{END_B}": torch.randn(5, 4, generator=draws)}
    state = {"global": lora, "rank": {"value": torch.tensor(4.0)}}
    assert federation.context.method.pruned(state, state) == {"value": torch.tensor(4.0)}
    less = {name: 0.9 * tensor for name, tensor in lora.items()}
    assert federation.context.method.pruned({**state, "global": less}, state) == {"value": torch.tensor(2.0)}


def assert_same_products(found, expected, rank):
    for module in modules(expected):
        assert found[module + END_A].shape[0] == found[module + END_B].shape[1] == rank
        products = [adapter[module + END_B] @ adapter[module + END_A] for adapter in (found, expected)]
        assert products[1].abs().max() > 1e-4
        torch.testing.assert_close(*products, atol=1e-9, rtol=0)


def made_updates(ranks, out=7, inputs=11, seed=3):
    draws = torch.Generator().manual_seed(seed)
    updates = []
    for number, rank in enumerate(ranks):
        tensors = {
            "global/m.lora_A.weight": torch.randn(rank, inputs, generator=draws, dtype=torch.float64),
            "global/m.lora_B.weight": torch.randn(out, rank, generator=draws, dtype=torch.float64),
            "head/out.weight": torch.randn(2, out, generator=draws, dtype=torch.float64),
        }
        updates.append(Update(f"silo{number}", tensors, 3 + 5 * number, received=tensors))
    return updates


def product(tensors):
    return (tensors["global/m.lora_B.weight"] @ tensors["global/m.lora_A.weight"]).numpy()


@pytest.mark.parametrize(("ranks", "r", "out", "inputs"), [((2, 3, 2), 7, 7, 11), ((9, 2), 9, 4, 6)])
def test_flexlora_whose_rank_suffices_has_the_mean_of_the_products(ranks, r, out, inputs):
    """A rank above a module's widths is filled with zeros."""
    updates = made_updates(ranks, out, inputs)
    aggregate = ProductSVD().aggregate(updates, made_updates((r,), out, inputs)[0].tensors)
    assert aggregate["global/m.lora_A.weight"].shape == (r, inputs)
    assert aggregate["global/m.lora_B.weight"].shape == (out, r)
    rows = sum(update.rows for update in updates)
    mean = sum(update.rows * product(update.tensors) for update in updates) / rows
    np.testing.assert_allclose(product(aggregate), mean, atol=1e-9)
    heads = sum(update.rows * update.tensors["head/out.weight"] for update in updates)
    np.testing.assert_allclose(aggregate["head/out.weight"], heads / rows, atol=1e-12)


def test_hetlora_of_equal_ranks_and_products_of_one_norm_is_the_plain_mean():
    first, second = made_updates((3, 3))
    scaled = dict(second.tensors)
    scaled["global/m.lora_B.weight"] = (
        second.tensors["global/m.lora_B.weight"]
        * np.linalg.norm(product(first.tensors))
        / np.linalg.norm(product(scaled))
    )
    updates = [first, replace(second, tensors=scaled)]
    aggregate = NormWeightedMeans().aggregate(updates, first.tensors)
    for name in ("global/m.lora_A.weight", "global/m.lora_B.weight"):
        np.testing.assert_allclose(
            aggregate[name], (updates[0].tensors[name] + updates[1].tensors[name]) / 2, atol=1e-12
        )


def test_hetlora_of_products_of_zero_is_the_mean_by_rows():
    updates = [
        replace(update, tensors=update.tensors | {"global/m.lora_B.weight": torch.zeros(7, rank, dtype=torch.float64)})
        for rank, update in zip((3, 3), made_updates((3, 3)), strict=True)
    ]
    aggregate = NormWeightedMeans().aggregate(updates, updates[0].tensors)
    rows = np.array([update.rows for update in updates])
    a = sum(n * update.tensors["global/m.lora_A.weight"] for n, update in zip(rows, updates, strict=True)) / rows.sum()
    np.testing.assert_allclose(aggregate["global/m.lora_A.weight"], a, atol=1e-12)
    assert not aggregate["global/m.lora_B.weight"].any()


def test_a_silo_whose_product_is_zero_weighs_nothing_beside_one_that_learned():
    first, second = made_updates((3, 3))
    idle = replace(first, tensors=first.tensors | {"global/m.lora_B.weight": torch.zeros(7, 3, dtype=torch.float64)})
    aggregate = NormWeightedMeans().aggregate([idle, second], first.tensors)
    np.testing.assert_allclose(product(aggregate), product(second.tensors), atol=1e-12)


def test_hetlora_leaves_a_factor_that_was_not_sent():
    """Silos of rank 2 have no third row of A; that none of them trained it is no reason to shrink it."""
    before = made_updates((3,), seed=5)[0].tensors
    received = NormWeightedMeans().to_rank(before, 2)
    name = "global/m.lora_B.weight"
    sent = [{name: before[name] + 1, "head/out.weight": before["head/out.weight"]}, {name: received[name] - 2}]
    sent[1]["head/out.weight"] = before["head/out.weight"]
    updates = [Update("one", sent[0], 3), Update("two", sent[1], 8, received)]
    aggregate = NormWeightedMeans().aggregate(updates, before)
    a, b = before["global/m.lora_A.weight"].numpy(), [update.tensors[name].numpy() for update in updates]
    norms = np.array([np.linalg.norm(b[0] @ a), np.linalg.norm(b[1] @ a[:2])])
    expected = norms[0] / norms.sum() * b[0]
    expected[:, :2] += norms[1] / norms.sum() * b[1]
    np.testing.assert_allclose(aggregate[name], expected, atol=1e-12)
    assert aggregate.keys() == {name, "head/out.weight"}


def test_a_silos_part_of_an_svd_is_the_best_of_its_rank():
    (update,) = made_updates((5,))
    update.tensors["global/m.lora_B.weight"][0] = 0  # a row that nobody trained is no reason for another cut
    received = ProductSVD().to_rank(update.tensors, 2)
    b, a = svd_cut(product(update.tensors), 2)
    np.testing.assert_allclose(product(received), b @ a, atol=1e-9)
    assert received["head/out.weight"] is update.tensors["head/out.weight"]


@pytest.mark.parametrize("kind", [ProductSVD, NormWeightedMeans])
def test_a_fresh_lora_is_cut_as_it_was_drawn(kind):
    (update,) = made_updates((5,))
    fresh = update.tensors | {"global/m.lora_B.weight": torch.zeros(7, 5, dtype=torch.float64)}
    received = kind().to_rank(fresh, 2)
    assert torch.equal(received["global/m.lora_A.weight"], fresh["global/m.lora_A.weight"][:2])
    assert received["global/m.lora_B.weight"].shape == (7, 2)
