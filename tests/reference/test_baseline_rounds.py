"""Whole local rounds of Ditto, FedRep, FedPer, FedMatch, FedAP and FedLR, recomputed outside silotune."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from silotune.core.tensors import copy
from silotune.methods.parts import Scope, names_with
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.storage.run_folder import RunFolder
from tests.support.rounds_by_hand import WORDS, Stage, assert_same, cross_entropy, descended, set_up, shared_of, states


def one_adapter(federation, silo, part="global", head="head"):
    return lambda state: cross_entropy(federation, silo, states(federation, silo, (1.0, state[part])), state[head])


# -- Ditto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto(lam, tiny_federation):
    """Algorithm 1: the global objective first; then `CE + (λ/2)·‖v − w‖²`, w as received, not as just trained."""
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


def test_dittos_phases_change_only_their_own_parts(tiny_federation):
    federation, silo, state = set_up(tiny_federation, "ditto")
    seen = watched(federation.context)
    federation.trainer.rounds([silo], shared_of(federation, state), 1)[0]
    for own, others in (("global", ("private", "head_private")), ("personal", ("global", "head_global"))):
        assert len(seen[own]) == 2
        assert_untouched(seen[own], others)
    assert changed(seen["global"][0]["global"], seen["personal"][0]["global"])


def test_dittos_personal_adapter_begins_as_the_global_one(tiny_federation):
    federation = tiny_federation("ditto")
    for silo in federation.silos.values():
        own, shared = federation.context.state_of(silo).private["private"], federation.coordinator.shared["global"]
        assert own.keys() == shared.keys()
        assert all(torch.equal(own[name], tensor) for name, tensor in shared.items())


# -- FedRep and FedPer ------------------------------------------------------------------------------------------------


def watched(training):
    """Phase name → copies of the silo's parts at each of its steps, filled while a round runs."""
    seen = {phase.name: [] for phase in training.phases}

    def spied(phase):
        def loss(step):
            seen[phase.name].append({part: copy(tensors) for part, tensors in step.state.items()})
            learns = {part for part, tensors in step.state.items() if any(t.requires_grad for t in tensors.values())}
            assert learns == {*phase.trains}
            return phase.loss(step)

        return replace(phase, loss=loss)

    training.phases = [spied(phase) for phase in training.phases]
    return seen


def changed(one, other):
    return any(not torch.equal(one[name], tensor) for name, tensor in other.items())


def assert_untouched(steps, parts):
    for part in parts:
        assert not any(changed(steps[0][part], step[part]) for step in steps), part


@pytest.mark.parametrize("head_epochs", [1, 3])
def test_fedrep(head_epochs, tiny_federation):
    """Algorithm 1: first the head's epochs with the body fixed, then the body's steps with that head fixed."""
    federation, silo, state = set_up(
        tiny_federation, "fedrep", "method.adapters=1", f"method.head_epochs={head_epochs}"
    )
    seen = watched(federation.context)
    result = federation.trainer.rounds([silo], shared_of(federation, state), 1)[0]
    loss = one_adapter(federation, silo)
    stages = [Stage(("head",), loss, steps=head_epochs), Stage(("global",), loss)]
    assert_same(result.state, descended(state, stages), state, ("global", "head"))

    assert (len(seen["head"]), len(seen["body"])) == (head_epochs, 2)
    assert_untouched(seen["head"], ["global"])  # bit for bit
    assert_untouched(seen["body"], ["head"])
    assert not changed(seen["body"][0]["global"], state["global"])  # the body begins as it was received
    assert not changed(seen["body"][0]["head"], result.state["head"])  # the head ends as its phase left it
    assert changed(seen["head"][0]["head"], seen["body"][0]["head"])


def test_fedpers_head_stays_also_where_fedavg_would_send_it(tiny_federation):
    one_task = ["data.tasks=[alpha]", "partition=iid", "partition.silos=2"]
    shared = tiny_federation("fedavg", "method.adapters=1", "head.scope=shared", *one_task)
    assert names_with(shared.context.parts, Scope.SHARED) == ["global", "head"]
    assert names_with(tiny_federation("fedper").context.parts, Scope.SHARED) == ["global", "global_2"]


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


def test_fedmatchs_patch_stays_where_it_is(tiny_federation, tmp_path):
    """After two rounds all silos have the same adapter, and each a patch of its own."""
    federation = tiny_federation("fedmatch", *WORDS)
    assert set(federation.coordinator.shared) == {"global"}
    InProcessEngine(federation, RunFolder.create(tmp_path / "run", "", "")).run()
    patches = [silo.state.private["private"] for silo in federation.silos.values()]
    assert len(patches) == 3
    for one, other in itertools.combinations(patches, 2):
        assert changed(one, other)
    assert all(changed(patch, federation.coordinator.shared["global"]) for patch in patches)
    assert {*next(iter(federation.silos.values())).state.private} == {"private", "head"}


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
