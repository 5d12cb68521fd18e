"""Two rounds of APFL, pFedMe, FDLoRA and FedALT, recomputed outside silotune in float64; and their limits."""

from __future__ import annotations

import pytest
import torch

from silotune.core.tensors import copy
from silotune.methods.parts import Scope, names_with
from silotune.models.tuners.base import TokenWeight
from silotune.training.silo import SiloState
from tests.support.rounds_by_hand import WORDS, Stage, descended
from tests.support.silos_by_hand import TWO, assert_models, averaged, constant, loss_of, run_rounds, set_up

# -- APFL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [True, False])
def test_apfl(adaptive, tiny_federation):
    federation, wholes = set_up(tiny_federation, "apfl", "method.alpha=0.3", f"method.adaptive={adaptive}")
    outside = 0
    if adaptive:  # each begins at an edge
        for edge, (name, whole) in enumerate(wholes.items()):
            whole["alpha"] = {"value": torch.tensor(float(edge), dtype=torch.float64)}
            federation.silos[name].state.private["alpha"] = copy(whole["alpha"])
    run_rounds(federation)
    for _ in range(2):
        for name, whole in wholes.items():

            def both(now, name=name):
                alpha = now["alpha"]["value"] if adaptive else 0.3
                w, head_w = constant(now["global"]), constant(now["head_global"])
                head = {key: alpha * v + (1 - alpha) * head_w[key] for key, v in now["head_private"].items()}
                mixed = loss_of(federation, name, head, (alpha, now["private"]), (1 - alpha, w))
                return loss_of(federation, name, now["head_global"], (1, now["global"])) + mixed

            for _ in range(2):
                whole = descended(whole, [Stage(tuple(whole), both, steps=1)])
                if adaptive:
                    alpha = float(whole["alpha"]["value"])
                    outside += not 0 <= alpha <= 1
                    whole["alpha"] = {"value": torch.tensor(min(max(alpha, 0.0), 1.0), dtype=torch.float64)}
            wholes[name] = whole
        averaged(wholes, ("global", "head_global"))
    assert_models(federation, wholes)
    assert outside or not adaptive


def test_apfl_with_alpha_0_is_fedavg_and_with_1_local_training(tiny_federation):
    """To the bit: the shared model of any α is FedAvg's, and the mixture is the one model alone."""
    finished = {}
    for method in ("apfl", "fedavg", "local"):
        words = {"apfl": ("method.adaptive=false", "method.alpha=1")}.get(method, ("method.adapters=1",))
        federation = tiny_federation(method, *WORDS, *TWO, *words)
        silo = next(iter(federation.silos.values()))
        start = federation.coordinator.shared or federation.context.state_of(silo).private
        begun = finished.setdefault("begun", start)  # APFL's, for all
        if method == "fedavg":
            federation.coordinator.shared = {"global": copy(begun["global"]), "head": copy(begun["head_global"])}
        if method == "local":
            for each in federation.silos.values():
                each.state = SiloState({"private": copy(begun["global"]), "head": copy(begun["head_global"])})
        run_one = federation.trainer.rounds([silo], federation.coordinator.shared, 1)[0]
        finished[method] = run_one.state
    mine = finished["apfl"]
    for adapter, head, other in (("global", "head_global", "fedavg"), ("private", "head_private", "local")):
        torch.testing.assert_close({adapter: mine[adapter], "head": mine[head]}, finished[other], rtol=0, atol=0)
    zero = tiny_federation("apfl", *WORDS, *TWO, "method.adaptive=false", "method.alpha=0").method.prediction()
    assert {name: weight for name, weight in zero.mix.items() if weight} == {"global": 1}
    assert {name: weight for name, weight in zero.head.items() if weight} == {"head_global": 1}


# -- pFedMe -----------------------------------------------------------------------------------------------------------

ENVELOPE = ("method.lam=0.5", "method.steps=3", "method.eta=0.4")


def test_pfedme(tiny_federation):
    """K = 3 steps of θ on each of two batches, a step of w after each, and β = 0.6 at the coordinator."""
    federation, wholes = set_up(tiny_federation, "pfedme", *ENVELOPE, "server.lr=0.6")
    run_rounds(federation)
    pairs = {"private": "global", "head": "head_global"}
    for _ in range(2):
        before = next(iter(wholes.values()))
        for name, whole in wholes.items():
            whole = whole | {own: copy(whole[common]) for own, common in pairs.items()}
            for _ in range(2):

                def envelope(now, name=name):
                    away = sum(
                        ((theta - now[common][key]) ** 2).sum()
                        for own, common in pairs.items()
                        for key, theta in now[own].items()
                    )
                    return loss_of(federation, name, now["head"], (1, now["private"])) + 0.5 / 2 * away

                whole = descended(whole, [Stage(tuple(pairs), envelope, steps=3)])
                for own, common in pairs.items():
                    theta = whole[own]
                    whole[common] = {key: w - 0.4 * 0.5 * (w - theta[key]) for key, w in whole[common].items()}
            wholes[name] = whole
        averaged(wholes, ("global", "head_global"), 0.6, before)
    assert_models(federation, wholes)


def test_pfedme_without_a_pull_is_fedavg(tiny_federation):
    """λ → 0 with η = 1/λ and one step per batch: `w ← θ`, one step of gradient descent."""
    lam = 2**-40
    federation, wholes = set_up(tiny_federation, "pfedme", f"method.lam={lam}", f"method.eta={1 / lam}",
                                "method.steps=1", "train.steps=1")  # fmt: skip
    plain, _ = set_up(tiny_federation, "fedavg", "method.adapters=1", "train.steps=1")
    whole = next(iter(wholes.values()))
    plain.coordinator.shared = {"global": copy(whole["global"]), "head": copy(whole["head_global"])}
    run_rounds(federation)
    run_rounds(plain)
    found = federation.coordinator.shared
    found = {"global": found["global"], "head": found["head_global"]}
    torch.testing.assert_close(found, plain.coordinator.shared, rtol=0, atol=1e-9)


# -- FDLoRA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [2, 5])
def test_fdlora(sync, tiny_federation):
    """Round 1 makes the personal LoRA, round 2 again with H = 2; Nesterov momentum; the fusion of both at the end."""
    federation, wholes = set_up(tiny_federation, "fdlora", f"method.sync={sync}", "method.l1=0.2")
    run_rounds(federation)
    shared = ("global", "head_global")
    momentum = {part: dict.fromkeys(next(iter(wholes.values()))[part], 0.0) for part in shared}
    for number in (1, 2):
        before = next(iter(wholes.values()))
        for name, whole in wholes.items():
            stage = Stage(
                shared, lambda now, name=name: loss_of(federation, name, now["head_global"], (1, now["global"]))
            )
            whole = descended(whole, [stage])
            if number in (1, sync):
                whole |= {"private": copy(whole["global"]), "head_private": copy(whole["head_global"])}
            wholes[name] = whole
        averaged(wholes, shared)
        for part in shared:
            mean = next(iter(wholes.values()))[part]
            delta = {key: mean[key] - before[part][key] for key in mean}
            momentum[part] = {key: 0.9 * momentum[part][key] + delta[key] for key in mean}
            stepped = {key: before[part][key] + 0.7 * (delta[key] + 0.9 * momentum[part][key]) for key in mean}
            for whole in wholes.values():
                whole[part] = stepped
    assert_models(federation, wholes)

    weights = ("fusion_personal", "fusion_global")
    for name, silo in federation.silos.items():

        def fused(now, name=name):
            personal, common = (now[part]["value"] for part in weights)
            head = {key: personal * v + common * now["head_global"][key] for key, v in now["head_private"].items()}
            loss = loss_of(federation, name, head, (personal, now["private"]), (common, now["global"]))
            return loss + 0.2 * (personal.abs() + common.abs())

        wholes[name] = descended(wholes[name], [Stage(weights, fused)])
        result = federation.trainer.finals([silo], federation.coordinator.shared, 2)[0]
        for part in weights:
            torch.testing.assert_close(result.state[part], wholes[name][part], rtol=0, atol=1e-9)
        personal = silo.state.private["private"]
        assert all(torch.equal(result.state["private"][key], tensor) for key, tensor in personal.items())


def test_a_silo_that_joins_fdlora_late_makes_its_personal_lora_then(tiny_federation):
    federation = tiny_federation("fdlora", "method.sync=10", "train.steps=1")
    late = federation.silos["gamma"]
    states = []
    for number in (3, 4):
        result = federation.trainer.rounds([late], federation.coordinator.shared, number)[0]
        states.append(result.state)
        private = names_with(federation.context.parts, Scope.PRIVATE)
        late.state = SiloState({name: result.state[name] for name in private}, result.memory)
    for personal, common in (("private", "global"), ("head_private", "head_global")):
        for name, tensor in states[0][common].items():
            assert torch.equal(states[0][personal][name], tensor), "a copy of what it trained in its first round"
            assert torch.equal(states[1][personal][name], tensor), "and kept from then on"
        assert any(not torch.equal(states[1][common][name], tensor) for name, tensor in states[0][common].items())


# -- FedALT -----------------------------------------------------------------------------------------------------------

REST = ("aggregation=rest-of-world", "partition.silos=3", "head.scope=private")


def test_fedalt(tiny_federation):
    """A silo's own LoRA goes on; beside it stands the mean of the others' last ones; softmax(G·x) weighs both."""
    federation, wholes = set_up(tiny_federation, "fedalt", *REST)
    run_rounds(federation)
    rest = {name: whole["global"] for name, whole in wholes.items()}  # as all receive it before the first update
    for _ in range(2):
        for name, whole in wholes.items():

            def mixture(now, name=name, others=rest[name]):
                def weight(index):
                    return lambda module, x: torch.softmax(x @ now["mixer"][f"{module}.mixer.weight"].T, -1)[:, [index]]

                return loss_of(federation, name, now["head"], (weight(0), now["private"]), (weight(1), others))

            wholes[name] = descended(whole, [Stage(("private", "mixer", "head"), mixture)])
        rest = {
            name: {
                key: sum(wholes[other]["private"][key] for other in wholes if other != name) / 2
                for key in whole["private"]
            }
            for name, whole in wholes.items()
        }
    for name, silo in federation.silos.items():
        found = federation.coordinator.shared_of(name) | silo.state.private
        torch.testing.assert_close(found, wholes[name] | {"global": rest[name]}, rtol=0, atol=1e-9)


def test_fedalt_whose_mixer_takes_its_own_lora_alone_is_local_training(tiny_federation, monkeypatch):
    monkeypatch.setattr(TokenWeight, "at", lambda self, module, x: torch.full_like(x[..., :1], float(self.index == 0)))
    federation, wholes = set_up(tiny_federation, "fedalt", *REST)
    plain, _ = set_up(tiny_federation, "local", "method.adapters=1", *REST[1:])
    for name, silo in plain.silos.items():
        silo.state = SiloState({part: copy(wholes[name][part]) for part in ("private", "head")})
    run_rounds(federation)
    run_rounds(plain)
    for name, silo in plain.silos.items():
        found = federation.silos[name].state.private
        found = {part: found[part] for part in silo.state.private}
        torch.testing.assert_close(found, silo.state.private, rtol=0, atol=1e-9)
