"""FedMCP's gradient in float64: a step by central finite differences, and a local round by hand."""

from __future__ import annotations

import pytest
import torch

from tests.support import rounds_by_hand
from tests.support.fedmcp_rig import GAMMA, MU, OPTIONS, PARTS, pooled, set_up, words_of
from tests.support.numeric_rig import make_step, some_rows, trained
from tests.support.rounds_by_hand import Stage, assert_same, cross_entropy, descended, shared_of, states

STEP = 1e-3


def central_difference(loss):
    """`(f(−2h) − 8·f(−h) + 8·f(h) − f(2h)) / 12h`, exact to fourth order."""
    found = [loss(steps * STEP) for steps in (-2, -1, 1, 2)]
    return (found[0] - 8 * found[1] + 8 * found[2] - found[3]) / (12 * STEP)


@pytest.mark.parametrize("name", ["paper", "cosine of first token", "private view full", "no backbone loss"])
def test_gradient_of_a_whole_step_along_directions(name, tiny_federation):
    """All coordinates of a part at once, each tensor by a direction of length 1."""
    words = [*words_of(OPTIONS[name]), "tuner.r=4"]
    federation, silo, state, received, batch = set_up(tiny_federation, "gamma", *words, rows=6, micro_batch=4)
    (phase,) = federation.context.phases
    current = dict(state)
    leaves = trained(current, phase)
    phase.loss(make_step(federation.context, phase, batch, current, received)).backward()
    whole = some_rows(federation, silo, 6, 6)  # the same rows, with half the calls
    draws = torch.Generator().manual_seed(0)
    for part in PARTS:
        own = {key.split("/", 1)[1]: leaf.grad for key, leaf in leaves.items() if key.startswith(f"{part}/")}
        if part == "head_global" and OPTIONS[name].get("gamma") == 0:
            assert all(found is None or not found.any() for found in own.values())  # that head is not used
            continue
        directions = {key: torch.randn(found.shape, generator=draws, dtype=found.dtype) for key, found in own.items()}
        directions = {key: direction / direction.norm() for key, direction in directions.items()}

        def loss(distance, part=part, directions=directions):
            moved = {key: tensor + distance * directions[key] for key, tensor in state[part].items()}
            with torch.no_grad():
                step = make_step(federation.context, phase, whole, state | {part: moved}, received)
                return float(phase.loss(step))

        expected = float(sum((found * directions[key]).sum() for key, found in own.items()))
        assert central_difference(loss) == pytest.approx(expected, rel=1e-5, abs=1e-10), part
        assert expected != 0


def test_the_received_adapter_is_an_anchor(tiny_federation):
    """Eq. 5 pulls toward the averaged adapter, which gets no gradient and does not change."""
    federation, _, state, received, batch = set_up(tiny_federation, "gamma", *words_of({}))
    (phase,) = federation.context.phases
    before = {name: tensor.clone() for name, tensor in received["global"].items()}
    trained(state, phase)
    step = make_step(federation.context, phase, batch, state, received)
    assert not any(reading.requires_grad for reading in step.views["received"].values())
    assert all(reading.requires_grad for view in ("full", "global", "private") for reading in step.views[view].values())
    phase.loss(step).backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in received["global"].items())


def kornblith(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return torch.linalg.norm(y.T @ x) ** 2 / (torch.linalg.norm(x.T @ x) * torch.linalg.norm(y.T @ y))


def test_two_local_steps_by_hand(tiny_federation):
    """A round of two steps over the whole silo as one batch: in the second, the global adapter has left the anchor."""
    federation, silo, state = rounds_by_hand.set_up(tiny_federation, "fedmcp", *words_of({}))
    result = federation.trainer.rounds([silo], shared_of(federation, state), 1)[0]
    assert result.metrics["steps"] == 2
    received = pooled(states(federation, silo, (1.0, state["global"])), "mean")

    def loss(now):
        full = states(federation, silo, (0.5, now["global"]), (0.5, now["private"]))
        only_global, only_private = (states(federation, silo, (1.0, now[part])) for part in ("global", "private"))
        loss_a = cross_entropy(federation, silo, full, now["head_full"])
        loss_b = cross_entropy(federation, silo, only_global, now["head_global"])
        x, y = pooled(only_global, "mean"), pooled(only_private, "mean")
        return (1 - GAMMA) * loss_a + GAMMA * loss_b + MU * (kornblith(x, y) - kornblith(x, received))

    assert_same(result.state, descended(state, [Stage(PARTS, loss)]), state, PARTS)
