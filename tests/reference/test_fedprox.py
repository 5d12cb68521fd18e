"""FedProx's proximal term (Li et al. 2020, eq. 2) by hand."""

from __future__ import annotations

import pytest
import torch

from tests.support.numeric_rig import arrays, doubled, make_step, random_parts, some_rows, trained

ADAPTERS = {1: ["global"], 2: ["global", "global_2"]}


def set_up(tiny_federation, method, adapters, *words):
    federation = doubled(tiny_federation(method, f"method.adapters={adapters}", *words))
    silo = federation.silos["beta"]
    state = random_parts(federation, silo, seed=1)
    received = {part: random_parts(federation, silo, seed=2)[part] for part in ADAPTERS[adapters]}
    return federation, silo, state, received, some_rows(federation, silo)


@pytest.mark.parametrize(("adapters", "mu"), [(1, 0.0), (2, 3.0)])
def test_loss_is_cross_entropy_and_half_mu_squared_distance(adapters, mu, tiny_federation):
    federation, _, state, received, batch = set_up(tiny_federation, "fedprox", adapters, f"method.mu={mu}")
    (phase,) = federation.context.phases
    step = make_step(federation.context, phase, batch, state, received)
    distance = sum(
        float(((mine - theirs) ** 2).sum())
        for part in ADAPTERS[adapters]
        for mine, theirs in zip(arrays(state[part]).values(), arrays(received[part]).values(), strict=True)
    )
    cross_entropy = float(step.cross_entropy("full"))
    assert float(phase.loss(step)) == pytest.approx(cross_entropy + mu / 2 * distance, rel=1e-12)
    assert distance > 1


@pytest.mark.parametrize("mu", [0.0, 3.0])
def test_fedits_loss_has_the_same_term(mu, tiny_federation):
    federation = doubled(tiny_federation("fedit", "tuner=lora", "head=linear", f"method.mu={mu}"))
    silo = federation.silos["beta"]
    state = random_parts(federation, silo, seed=1)
    received = {"global": random_parts(federation, silo, seed=2)["global"]}
    (phase,) = federation.context.phases
    step = make_step(federation.context, phase, some_rows(federation, silo), state, received)
    distance = sum(
        float((state["global"][name] - theirs).square().sum()) for name, theirs in received["global"].items()
    )
    assert float(phase.loss(step)) == pytest.approx(float(step.cross_entropy("global")) + mu / 2 * distance, rel=1e-12)
    assert {*step.terms} == ({"cross_entropy", "distance"} if mu else set())
    assert distance > 1


@pytest.mark.parametrize("adapters", [1, 2])
def test_gradient_is_fedavgs_and_mu_times_the_way_from_the_received_parts(adapters, tiny_federation):
    gradients = {}
    for method, words in {"fedavg": [], "fedprox": ["method.mu=0.7"]}.items():
        federation, _, state, received, batch = set_up(tiny_federation, method, adapters, *words)
        (phase,) = federation.context.phases
        leaves = trained(state, phase)
        phase.loss(make_step(federation.context, phase, batch, state, received)).backward()
        gradients[method] = {name: leaf.grad for name, leaf in leaves.items()}
    assert gradients["fedavg"].keys() == gradients["fedprox"].keys()
    for key, plain in gradients["fedavg"].items():
        part, name = key.split("/", 1)
        away = 0.7 * (state[part][name].detach() - received[part][name]) if part in received else 0  # heads are free
        torch.testing.assert_close(gradients["fedprox"][key], plain + away, rtol=0, atol=1e-10)
