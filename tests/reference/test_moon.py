"""MOON (Li, He and Song 2021): its loss in NumPy, and rounds by hand: first participation, later ones, absences."""

from __future__ import annotations

import math

import pytest
import torch

from silotune.training.silo import SiloState
from tests.support import by_hand
from tests.support.fedmcp_rig import forward_by_hand, pooled
from tests.support.numeric_rig import arrays, doubled, make_step, random_parts, some_rows
from tests.support.rounds_by_hand import Stage, assert_same, cross_entropy, descended, set_up, shared_of, states

ADAPTERS = {1: ["global"], 2: ["global", "global_2"]}


def mixed(state, adapters):
    return [(1 / adapters, state[part]) for part in ADAPTERS[adapters]]


@pytest.mark.parametrize(
    ("tau", "mu", "adapters", "representation"),
    [(0.5, 1.0, 1, "mean"), (0.05, 5.0, 1, "first"), (2.0, 0.1, 2, "mean")],
)
def test_loss_in_numpy(tau, mu, adapters, representation, tiny_federation):
    words = [f"method.{k}={v}" for k, v in {"tau": tau, "mu": mu, "adapters": adapters}.items()]
    federation = doubled(tiny_federation("moon", *words, f"method.representation={representation}"))
    silo = federation.silos["gamma"]
    state, received, before = (random_parts(federation, silo, seed=seed) for seed in (1, 2, 3))
    memory = {f"previous/{part}/{key}": t for part in ADAPTERS[adapters] for key, t in before[part].items()}
    batch, (phase,) = some_rows(federation, silo), federation.context.phases
    step = make_step(federation.context, phase, batch, state, received, memory)
    loss = float(phase.loss(step))

    rows = batch.rows.tolist()
    found = [forward_by_hand(federation, silo, rows, *mixed(parts, adapters)) for parts in (state, received, before)]
    z, z_glob, z_prev = (pooled(view, representation).numpy() for view in found)
    contrastive = by_hand.model_contrast(z, z_glob, z_prev, tau)
    x = pooled(found[0], federation.method.setting.head.pooling).numpy()
    labels = [int(silo.train[silo.name].labels[row]) for row in rows]
    supervised = by_hand.cross_entropy(by_hand.mlp_head(arrays(state["head"]), silo.name, x), labels)
    assert float(step.terms["cross_entropy"]) == pytest.approx(supervised, rel=1e-9)
    assert float(step.terms["contrastive"]) == pytest.approx(contrastive, rel=1e-9)
    assert loss == pytest.approx(supervised + mu * contrastive, rel=1e-9)
    swapped = by_hand.model_contrast(z, z_prev, z_glob, tau)
    assert abs(contrastive - swapped) > 1e-4  # the two anchors cannot be told apart otherwise


def loss_by_hand(federation, silo, received, before, mu, tau):
    anchors = [states(federation, silo, (1.0, parts["global"])) for parts in (received, before)]
    z_glob, z_prev = (pooled(view, "mean").detach() for view in anchors)

    def sim(a, b):
        return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()

    def loss(state):
        full = states(federation, silo, (1.0, state["global"]))
        z = pooled(full, "mean")
        up, down = (sim(z, z_glob) / tau).exp(), (sim(z, z_prev) / tau).exp()
        return cross_entropy(federation, silo, full, state["head"]) - mu * (up / (up + down)).log().mean()

    return loss


def test_three_participations_by_hand(tiny_federation):
    """At first the previous model is the received one; later it is the silo's last one, also after absences."""
    mu, tau = 3.0, 0.2
    words = ("method.adapters=1", f"method.mu={mu}", f"method.tau={tau}")
    federation, silo, _ = set_up(tiny_federation, "moon", *words)
    previous = None
    for number, seed in ((1, 5), (2, 6), (7, 8)):  # rounds 3 to 6 go on without this silo
        received = {"global": random_parts(federation, silo, seed=seed)["global"]}
        result = federation.trainer.rounds([silo], received, number)[0]
        start = received | {"head": silo.state.private["head"]}
        before = previous or received
        loss = loss_by_hand(federation, silo, received, before, mu, tau)
        expected = descended(start, [Stage(("global", "head"), loss)])
        assert_same(result.state, expected, start, ("global", "head"))
        if previous is None:
            assert result.metrics["contrastive"] == pytest.approx(math.log(2), rel=1e-12)
        else:
            assert abs(result.metrics["contrastive"] - math.log(2)) > 1e-3
        silo.state = SiloState({"head": result.state["head"]}, result.memory)
        remembered = {key.removeprefix("previous/global/"): tensor for key, tensor in result.memory.items()}
        assert remembered.keys() == result.state["global"].keys()
        assert all(torch.equal(remembered[key], tensor) for key, tensor in result.state["global"].items())
        previous = {"global": result.state["global"]}


def test_the_first_participation_is_fedavgs(tiny_federation):
    """Equal anchors: the term is log 2, whatever the model, and has no gradient."""
    found = {}
    for method, words in {"fedavg": (), "moon": ("method.mu=5",)}.items():
        federation, silo, state = set_up(tiny_federation, method, *words)
        found[method] = federation.trainer.rounds([silo], shared_of(federation, state), 1)[0].state
    torch.testing.assert_close(found["moon"], found["fedavg"], rtol=0, atol=1e-12)
