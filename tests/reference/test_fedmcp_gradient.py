"""FedMCP's gradient in float64: a step by central finite differences, and local rounds by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.fedmcp_rig import GAMMA, MU, OPTIONS, PARTS, forward_by_hand, pooled, set_up, words_of
from tests.support.numeric_rig import doubled, make_step, random_parts, some_rows, trained

# -- gradient ---------------------------------------------------------------------------------------------------------


def loss_and_gradient(federation, state, received, batch):
    (phase,) = federation.context.phases
    state = dict(state)
    leaves = trained(state, phase)
    loss = phase.loss(make_step(federation.context, phase, batch, state, received))
    loss.backward()
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def loss_at(federation, state, received, batch):
    (phase,) = federation.context.phases
    with torch.no_grad():
        return float(phase.loss(make_step(federation.context, phase, batch, state, received)))


STEP = 1e-3


def central_difference(loss, tensor, index):
    """`(f(−2h) − 8·f(−h) + 8·f(h) − f(2h)) / 12h`, exact to fourth order."""
    flat, value = tensor.view(-1), float(tensor.view(-1)[index])
    found = []
    for steps in (-2, -1, 1, 2):
        flat[index] = value + steps * STEP
        found.append(loss())
    flat[index] = value
    return (found[0] - 8 * found[1] + 8 * found[2] - found[3]) / (12 * STEP)


every_loss = pytest.mark.parametrize(
    "name", ["paper", "cosine of first token", "private view full", "no backbone loss"]
)


@every_loss
def test_gradient_of_a_whole_step_along_directions(name, tiny_federation):
    """All coordinates of a part at once, each tensor by a direction of length 1; one by one they are below."""
    words = [*words_of(OPTIONS[name]), "tuner.r=4"]
    federation, _, state, received, batch = set_up(tiny_federation, "gamma", *words, rows=6, micro_batch=4)
    gradient = loss_and_gradient(federation, state, received, batch)
    whole = some_rows(federation, federation.silos["gamma"], 6, 6)  # the same rows, with half the calls
    draws = torch.Generator().manual_seed(0)
    for part in PARTS:
        own = {key.split("/", 1)[1]: found for key, found in gradient.items() if key.startswith(f"{part}/")}
        if part == "head_global" and OPTIONS[name].get("gamma") == 0:
            assert not any(found.any() for found in own.values())  # that head is not used
            continue
        kept = state[part]
        directions = {key: torch.randn(found.shape, generator=draws, dtype=found.dtype) for key, found in own.items()}
        directions = {key: direction / direction.norm() for key, direction in directions.items()}
        distance = torch.zeros(1, dtype=torch.float64)

        def loss(part=part, kept=kept, directions=directions, distance=distance):
            moved = {key: tensor + distance * directions[key] for key, tensor in kept.items()}
            return loss_at(federation, state | {part: moved}, received, whole)

        expected = float(sum((found * directions[key]).sum() for key, found in own.items()))
        assert central_difference(loss, distance, 0) == pytest.approx(expected, rel=1e-5, abs=1e-10), part
        assert expected != 0


@pytest.mark.long
@every_loss
def test_gradient_of_a_whole_step_by_finite_differences(name, tiny_federation):
    words = [*words_of(OPTIONS[name]), "tuner.r=4"]
    federation, _, state, received, batch = set_up(tiny_federation, "gamma", *words, rows=6, micro_batch=4)
    gradient = loss_and_gradient(federation, state, received, batch)
    whole = some_rows(federation, federation.silos["gamma"], 6, 6)  # the same rows, with half the calls
    assert {key.split("/")[0] for key in gradient} == set(PARTS)
    draws = np.random.default_rng(0)
    checked = 0
    for key, found in gradient.items():
        part, tensor = key.split("/", 1)
        if part == "head_global" and OPTIONS[name].get("gamma") == 0:
            assert not found.any()  # that head is not used
            continue
        largest = int(found.abs().argmax())
        for index in {largest, *draws.integers(found.numel(), size=2 if name == "paper" else 0).tolist()}:
            numeric = central_difference(
                lambda: loss_at(federation, state, received, whole), state[part][tensor], index
            )
            assert numeric == pytest.approx(float(found.view(-1)[index]), rel=1e-5, abs=1e-10), (key, index)
            checked += 1
        assert float(found.view(-1)[largest]) != 0
    assert checked >= (100 if name == "paper" else 30)


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


# -- whole rounds -----------------------------------------------------------------------------------------------------


def kornblith(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return torch.linalg.norm(y.T @ x) ** 2 / (torch.linalg.norm(x.T @ x) * torch.linalg.norm(y.T @ y))


def loss_in_torch(federation, silo, state, received, pooling):
    """Compute the paper's loss over all rows of the silo through the hand-written forward; differentiable."""
    rows = range(silo.rows)
    labels = silo.train[silo.name].labels

    def cross_entropy(states, head):
        x = pooled(states, pooling)
        tensors = state[head]
        hidden = torch.tanh(x @ tensors[f"{silo.name}.dense.weight"].T + tensors[f"{silo.name}.dense.bias"])
        logits = hidden @ tensors[f"{silo.name}.out.weight"].T + tensors[f"{silo.name}.out.bias"]
        return (torch.logsumexp(logits, -1) - logits[torch.arange(len(labels)), labels]).mean()

    g, p = state["global"], state["private"]
    full = forward_by_hand(federation, silo, rows, (0.5, g), (0.5, p))
    only_global = forward_by_hand(federation, silo, rows, (1.0, g))
    x = pooled(only_global, "mean")
    y = pooled(forward_by_hand(federation, silo, rows, (1.0, p)), "mean")
    z = pooled(forward_by_hand(federation, silo, rows, (1.0, received["global"])), "mean").detach()
    supervised = (1 - GAMMA) * cross_entropy(full, "head_full") + GAMMA * cross_entropy(only_global, "head_global")
    return supervised + MU * (kornblith(x, y) - kornblith(x, z))


def descend(optimizer, lr, tensors, gradients, memory, number):
    """One step of plain gradient descent, or of Adam (Kingma & Ba 2015, Algorithm 1)."""
    updated = []
    for position, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        if optimizer == "sgd":
            updated.append(tensor - lr * gradient)
            continue
        first, second = memory.get(position, (0, 0))
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        memory[position] = (first, second)
        corrected = (first / (1 - 0.9**number), second / (1 - 0.999**number))
        updated.append(tensor - lr * corrected[0] / (corrected[1].sqrt() + 1e-8))
    return updated


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.5), ("adam", 0.01)])
def test_two_local_steps_by_hand(optimizer, lr, tiny_federation):
    """A round of two steps over the whole silo as one batch: in the second, the global adapter has left the anchor."""
    words = ["train.batch_size=64", "train.steps=2", f"train.optimizer={optimizer}", f"train.lr={lr}", "tuner.r=4"]
    federation = doubled(tiny_federation("fedmcp", *words_of({}), *words))
    silo = federation.silos["gamma"]
    state = random_parts(federation, silo)
    silo.state = federation.context.state_of(silo)
    silo.state.private = {part: state[part] for part in ("private", "head_full", "head_global")}
    result = federation.trainer.rounds([silo], {"global": state["global"]}, 1)[0]
    assert result.metrics["steps"] == 2

    expected = {part: {name: tensor.cpu() for name, tensor in tensors.items()} for part, tensors in state.items()}
    received = {"global": expected["global"]}
    keys = [(part, name) for part, tensors in expected.items() for name in tensors]
    memory = {}
    for number in (1, 2):
        leaves = [expected[part][name].clone().requires_grad_() for part, name in keys]
        current = {part: {} for part in expected}
        for (part, name), leaf in zip(keys, leaves, strict=True):
            current[part][name] = leaf
        loss = loss_in_torch(federation, silo, current, received, "mean")
        gradients = torch.autograd.grad(loss, leaves)
        moved = descend(optimizer, lr, [leaf.detach() for leaf in leaves], gradients, memory, number)
        expected = {part: {} for part in expected}
        for (part, name), tensor in zip(keys, moved, strict=True):
            expected[part][name] = tensor
    for part, name in keys:
        torch.testing.assert_close(result.state[part][name], expected[part][name], rtol=0, atol=1e-8)
        assert (result.state[part][name] - state[part][name].cpu()).abs().max() > 1e-6
