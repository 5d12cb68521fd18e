"""Rounds of methods that split LoRA's A and B, against gradient descent by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.core.tensors import copy
from silotune.evaluation.instance_vectors import personalized_state
from silotune.methods import PredictionMix, Scope
from silotune.methods.instance_weighting import INSTANCES, VECTORS, InstanceWeighting
from silotune.methods.lora_factors import A, B, FedSALoRA, SplitLoRA
from tests.support.rounds_by_hand import Stage, descended
from tests.support.silos_by_hand import assert_models, averaged, loss_of, run_rounds, set_up


def trained_by_hand(federation, wholes, trains):
    """Set all silos' states to those after gradient descent on their own rows."""
    for name, whole in wholes.items():

        def loss(now, name=name):
            return loss_of(federation, name, now["head"], (1, now[A] | now[B]))

        wholes[name] = descended(whole, [Stage(trains, loss)])


TWO_ROUNDS = {
    "ffa-lora": [((B, "head"), (B, "head"))] * 2,
    "fedsa-lora": [((A, B, "head"), (A, "head"))] * 2,
    "rolora": [((B, "head"), (B, "head")), ((A, "head"), (A, "head"))],
}
"""Method → per round: the parts that silos train, and those of which the coordinator takes the mean."""


@pytest.mark.parametrize("method", TWO_ROUNDS)
def test_two_rounds_of_two_silos(tiny_federation, method):
    federation, wholes = set_up(tiny_federation, method)
    run_rounds(federation)
    for trains, shared in TWO_ROUNDS[method]:
        trained_by_hand(federation, wholes, trains)
        averaged(wholes, shared)
    assert_models(federation, wholes)


def test_two_rounds_in_which_a_and_b_take_turns(tiny_federation):
    """LA-LoRA: of the two steps of a round the first trains B, the second A."""
    federation, wholes = set_up(tiny_federation, "la-lora", "tuner.lr_ratio=1")
    run_rounds(federation)
    for _ in range(2):
        for name, whole in wholes.items():

            def loss(now, name=name):
                return loss_of(federation, name, now["head"], (1, now[A] | now[B]))

            wholes[name] = descended(whole, [Stage((B, "head"), loss, 1), Stage((A, "head"), loss, 1)])
        averaged(wholes, (A, B, "head"))
    assert_models(federation, wholes)


def test_two_rounds_of_two_silos_with_an_svd_between(tiny_federation):
    """FedSVD in NumPy. What silos train does not depend on the signs of an SVD's vectors, so products are compared."""
    federation, wholes = set_up(tiny_federation, "fedsvd", "aggregation=fedsvd")
    run_rounds(federation)
    for _ in range(2):
        trained_by_hand(federation, wholes, (B, "head"))
        averaged(wholes, (B, "head"))
        whole = next(iter(wholes.values()))
        products = {}
        for a, down in whole[A].items():
            b = a.replace(".lora_A.", ".lora_B.")
            products[a, b] = (whole[B][b] @ down).numpy()
            u, values, vt = np.linalg.svd(products[a, b])
            for each in wholes.values():
                each[B] = each[B] | {b: torch.from_numpy(u[:, :4] * values[:4])}
                each[A] = each[A] | {a: torch.from_numpy(vt[:4])}
    shared = federation.coordinator.shared
    for (a, b), product in products.items():
        np.testing.assert_allclose(shared[B][b] @ shared[A][a], product, rtol=0, atol=1e-9)
        np.testing.assert_allclose(shared[A][a] @ shared[A][a].T, np.eye(4), rtol=0, atol=1e-9)
    torch.testing.assert_close(shared["head"], whole["head"], rtol=0, atol=1e-9)


def test_fedsa_whose_b_is_shared_is_fedit(tiny_federation, monkeypatch):
    monkeypatch.setattr(FedSALoRA, "b", Scope.SHARED)
    split, wholes = set_up(tiny_federation, "fedsa-lora")
    whole, _ = set_up(tiny_federation, "fedit")
    first = next(iter(wholes.values()))
    whole.coordinator.shared = {"global": copy(first[A] | first[B]), "head": copy(first["head"])}
    run_rounds(split)
    run_rounds(whole)
    shared = split.coordinator.shared
    found = {"global": shared[A] | shared[B], "head": shared["head"]}
    torch.testing.assert_close(found, whole.coordinator.shared, rtol=0, atol=0)


def test_the_fixed_factor_is_the_same_everywhere_and_in_no_state(tiny_federation):
    federation = tiny_federation("ffa-lora", "tuner.r=4", "train.steps=1")
    again = tiny_federation("ffa-lora", "tuner.r=4", "train.steps=1")
    for name, tensor in federation.context.fixed["lora_A"].items():
        assert tensor.abs().max() > 0
        assert torch.equal(tensor, again.context.fixed["lora_A"][name])
    assert "lora_A" not in federation.coordinator.shared
    client, silo = federation.client(), federation.silos["gamma"]
    client.rounds([silo], federation.coordinator.broadcast(1))
    assert "lora_A" not in silo.state.private


def test_texts_may_be_weighed_under_a_joined_adapter(tiny_federation, monkeypatch):
    """The vectors of a silo's rows are made anew once either factor is another."""
    (adapter,) = SplitLoRA.mix
    weighting = InstanceWeighting(adapter, adapter, SplitLoRA.mix)
    monkeypatch.setattr(SplitLoRA, "prediction", lambda self: PredictionMix(self.mix, weighting=weighting))
    federation = tiny_federation("fedsa-lora", "tuner.r=4", "train.steps=1", "train.lr=0.1")
    federation.client().rounds([silo := federation.silos["gamma"]], federation.coordinator.broadcast(1))

    def vectors(shared):
        return personalized_state(federation.context, silo, shared)[INSTANCES][VECTORS]

    shared = federation.coordinator.shared
    first = vectors(shared)
    assert len(first) == sum(map(len, silo.train.values()))
    assert vectors(shared) is first
    doubled = vectors({A: {name: 2 * tensor for name, tensor in shared[A].items()}})
    assert not torch.equal(doubled, first)
    silo.state.private[B] = {name: 2 * tensor for name, tensor in silo.state.private[B].items()}
    torch.testing.assert_close(vectors(shared), doubled)
