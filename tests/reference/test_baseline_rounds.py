"""Whole local rounds of Ditto, FedRep, FedPer, FedMatch, FedAP and FedLR, recomputed outside silotune."""

from __future__ import annotations

import pytest
import torch

from silotune.core.tensors import copy
from tests.support.rounds_by_hand import Stage, assert_same, cross_entropy, descended, set_up, shared_of, states


def one_adapter(federation, silo, part="global", head="head"):
    return lambda state: cross_entropy(federation, silo, states(federation, silo, (1.0, state[part])), state[head])


# -- Ditto ------------------------------------------------------------------------------------------------------------


def test_ditto(tiny_federation):
    """Algorithm 1: the global objective first; then `CE + (λ/2)·‖v − w‖²`, w as received, not as just trained."""
    lam = 0.7
    federation, silo, state = set_up(tiny_federation, "ditto", f"method.lam={lam}")
    received = copy(state["global"])
    result = federation.trainer.rounds([silo], shared_of(federation, state), 1)[0]

    def personal(now):
        away = sum(((now["private"][name] - anchor) ** 2).sum() for name, anchor in received.items())
        return one_adapter(federation, silo, "private", "head_private")(now) + lam / 2 * away

    stages = [
        Stage(("global", "head_global"), one_adapter(federation, silo, "global", "head_global")),
        Stage(("private", "head_private"), personal),
    ]
    everything = ("global", "head_global", "private", "head_private")
    assert_same(result.state, descended(state, stages), state, everything)


def test_dittos_personal_adapter_begins_as_the_global_one(tiny_federation):
    federation = tiny_federation("ditto")
    for silo in federation.silos.values():
        own, shared = federation.context.state_of(silo).private["private"], federation.coordinator.shared["global"]
        assert own.keys() == shared.keys()
        assert all(torch.equal(own[name], tensor) for name, tensor in shared.items())


# -- FedRep and FedPer ------------------------------------------------------------------------------------------------


def test_fedrep(tiny_federation):
    """Algorithm 1: first the head's epochs with the body fixed, then the body's steps with that head fixed."""
    federation, silo, state = set_up(tiny_federation, "fedrep", "method.adapters=1", "method.head_epochs=3")
    result = federation.trainer.rounds([silo], shared_of(federation, state), 1)[0]
    loss = one_adapter(federation, silo)
    stages = [Stage(("head",), loss, steps=3), Stage(("global",), loss)]
    assert_same(result.state, descended(state, stages), state, ("global", "head"))


# -- rounds whose parts train together --------------------------------------------------------------------------------

TOGETHER = {
    "fedrep": (["method.adapters=2"], {"global": 0.5, "global_2": 0.5}),
    "fedper": (["method.adapters=1"], {"global": 1.0}),
    "fedmatch": ([], {"global": 0.5, "private": 0.5}),  # shared adapter and private patch
    "fedap": ([], {"global": 1.0}),  # one bottleneck, whatever tuner the setting has
}
"""Method → words, and the mix of its adapters, which learn together with the head; in FedRep after it."""


@pytest.mark.parametrize("method", TOGETHER)
def test_a_mix_that_learns_together(method, tiny_federation):
    words, mix = TOGETHER[method]
    federation, silo, state = set_up(tiny_federation, method, *words)
    assert set(state) == {*mix, "head"}
    result = federation.trainer.rounds([silo], shared_of(federation, state), 1)[0]

    def loss(now):
        mixed = states(federation, silo, *((weight, now[name]) for name, weight in mix.items()))
        return cross_entropy(federation, silo, mixed, now["head"])

    alone = [Stage(("head",), loss, steps=1), Stage((*mix,), loss)]
    stages = alone if method == "fedrep" else [Stage((*mix, "head"), loss)]
    assert_same(result.state, descended(state, stages), state, (*mix, "head"))


def test_fedlr(tiny_federation):
    """`W·x + (alpha / r)·B·A·x` on query and value; here r = 4 and alpha = 6."""
    federation, silo, state = set_up(tiny_federation, "fedlr", "tuner.alpha=6")
    assert all(".query.lora_" in name or ".value.lora_" in name for name in state["global"])
    result = federation.trainer.rounds([silo], shared_of(federation, state), 1)[0]

    def loss(now):
        found = states(federation, silo, loras=[(6 / 4, now["global"])])
        return cross_entropy(federation, silo, found, now["head"])

    assert_same(result.state, descended(state, [Stage(("global", "head"), loss)]), state, ("global", "head"))


@pytest.mark.parametrize(("method", "kind", "r"), [("fedap", "bottleneck", 16), ("fedlr", "lora", 16)])
def test_the_rank_is_the_papers(method, kind, r, tiny_config):
    config = tiny_config(method)
    assert (config.tuner.name, config.tuner.options["r"]) == (kind, r)
