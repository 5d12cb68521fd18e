"""Rounds of methods that split LoRA's A and B, against gradient descent by hand."""

from __future__ import annotations

import pytest
import torch

from silotune.communication.messages import read_broadcast
from silotune.evaluation.instance_vectors import personalized_state
from silotune.methods import PredictionMix
from silotune.methods.instance_weighting import INSTANCES, VECTORS, InstanceWeighting
from silotune.methods.split_lora import A, B, SplitLoRA
from tests.support.method_cases import read_message
from tests.support.rounds_by_hand import Stage, assert_same, cross_entropy, descended, set_up, shared_of, states

SCALE = 6 / 4
TRAINS = {
    ("ffa-lora", 1): ("lora_B", "head"),
    ("fedsa-lora", 1): ("lora_A", "lora_B", "head"),
    ("rolora", 1): ("lora_B", "head"),
    ("rolora", 2): ("lora_A", "head"),
    ("fedsvd", 1): ("lora_B", "head"),
}
"""Method and round → the parts that it trains, by its paper."""

SENT = {
    ("ffa-lora", 1): {"lora_B"},
    ("fedsa-lora", 1): {"lora_A"},
    ("rolora", 1): {"lora_B"},
    ("rolora", 2): {"lora_A"},
    ("fedsvd", 1): {"lora_B"},
}


@pytest.mark.parametrize(("method", "number"), TRAINS)
def test_a_round_descends_on_the_papers_factors(tiny_federation, method, number):
    federation, silo, state = set_up(tiny_federation, method, "tuner.alpha=6")
    result = federation.trainer.rounds([silo], shared_of(federation, state), number)[0]

    def loss(now):
        found = states(federation, silo, loras=[(SCALE, now["lora_A"] | now["lora_B"])])
        return cross_entropy(federation, silo, found, now["head"])

    trained = TRAINS[method, number]
    assert_same(result.state, descended(state, [Stage(trained, loss)]), state, trained)


@pytest.mark.parametrize(("method", "number"), SENT)
def test_an_update_holds_what_its_round_trained_and_is_shared(tiny_federation, method, number):
    federation = tiny_federation(method, "tuner.r=4", "train.steps=1")
    client, coordinator = federation.client(), federation.coordinator
    broadcast = coordinator.broadcast(number)
    silo = federation.silos["gamma"]
    (reply,) = client.rounds([silo], broadcast)
    assert {name.split("/")[0] for name in read_message(reply.message)[0]} == SENT[method, number]
    received, _ = read_broadcast(broadcast, coordinator.expected)
    coordinator.aggregate([coordinator.receive(number, "gamma", reply.message)], number)
    for part in {"lora_A", "lora_B"} & coordinator.shared.keys() - SENT[method, number]:
        for name, tensor in coordinator.shared[part].items():
            assert method == "fedsvd" or torch.equal(tensor, received[part][name])


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
