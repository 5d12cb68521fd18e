"""The proximal term of FedProx (Li et al. 2020, eq. 2) and of FedIT by hand."""

from __future__ import annotations

import pytest
import torch

from tests.support.numeric_rig import doubled, make_step, random_parts, some_rows, trained

ADAPTERS = {1: ["global"], 2: ["global", "global_2"]}
FEDIT = ("tuner=lora", "head=linear")


def set_up(tiny_federation, method, adapters, *words):
    federation = doubled(tiny_federation(method, *words))
    silo = federation.silos["beta"]
    state = random_parts(federation, silo, seed=1)
    received = {part: random_parts(federation, silo, seed=2)[part] for part in ADAPTERS[adapters]}
    return federation, silo, state, received, some_rows(federation, silo)


@pytest.mark.parametrize("mu", [0.0, 3.0])
@pytest.mark.parametrize(
    ("method", "adapters", "words"),
    [("fedprox", 1, ("method.adapters=1",)), ("fedprox", 2, ("method.adapters=2",)), ("fedit", 1, FEDIT)],
)
def test_loss_is_cross_entropy_and_half_mu_squared_distance(method, adapters, words, mu, tiny_federation):
    federation, _, state, received, batch = set_up(tiny_federation, method, adapters, *words, f"method.mu={mu}")
    (phase,) = federation.context.phases
    step = make_step(federation.context, phase, batch, state, received)
    distance = sum(
        float((state[part][name] - theirs).square().sum())
        for part, tensors in received.items()
        for name, theirs in tensors.items()
    )
    cross_entropy = float(step.cross_entropy("full" if method == "fedprox" else "global"))
    assert float(phase.loss(step)) == pytest.approx(cross_entropy + mu / 2 * distance, rel=1e-12)
    assert {*step.terms} == ({"cross_entropy", "distance"} if mu or method == "fedprox" else set())
    assert distance > 1


@pytest.mark.parametrize("adapters", [1, 2])
def test_gradient_is_fedavgs_and_mu_times_the_way_from_the_received_parts(adapters, tiny_federation):
    gradients = {}
    for method, words in {"fedavg": [], "fedprox": ["method.mu=0.7"]}.items():
        words = [f"method.adapters={adapters}", *words]
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
