"""FedMCP's loss (Zhao et al. 2024, eqs. 3-8) under all its options, recomputed outside silotune.

Values: views by a hand-written BERT forward, heads, cross-entropy and CKA in NumPy. Gradient: central finite
differences of the loss in float64. Whole local rounds: gradient steps written out.
"""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from rig import arrays, doubled, make_step, random_parts, some_rows, trained

PARTS = ["global", "private", "head_full", "head_global"]
GAMMA, MU = 0.3, 0.4

OPTIONS = {
    "paper": {},
    "no backbone loss": {"gamma": 0.0},
    "no contrastive loss": {"mu": 0.0},
    "neither": {"gamma": 0.0, "mu": 0.0},
    "backbone loss alone": {"gamma": 1.0},
    "cosine": {"similarity": "cosine"},
    "first token": {"representation": "first"},
    "cosine of first token": {"similarity": "cosine", "representation": "first"},
    "private view full": {"private_view": "full"},
    "private view full, no backbone loss": {"private_view": "full", "gamma": 0.0},
}


def words_of(options):
    chosen = {"gamma": GAMMA, "mu": MU} | options
    return [f"method.{name}={value}" for name, value in chosen.items()]


def set_up(tiny_federation, task, *words, rows=8, micro_batch=3):
    """A federation in float64 with random parts, another received adapter, and a batch."""
    federation = doubled(tiny_federation("fedmcp", *words))
    silo = federation.silos[task]
    state = random_parts(federation, silo, seed=5)
    received = {"global": random_parts(federation, silo, seed=6)["global"]}
    return federation, silo, state, received, some_rows(federation, silo, rows, micro_batch)


def forward_by_hand(federation, silo, rows, *adapters):
    """One pass of the hand-written BERT: states of every row, one by one, so without any padding."""
    backbone = federation.backbone
    (data,) = silo.train.values()
    weights = {key: tensor.cpu() for key, tensor in backbone.base.state_dict().items()}
    mixed = [(weight, {key: tensor.cpu() for key, tensor in part.items()}) for weight, part in adapters]
    config = backbone.base.config
    return [
        by_hand.bert(
            weights,
            data.ids[row],
            data.types[row],
            heads=config.num_attention_heads,
            eps=config.layer_norm_eps,
            bottlenecks=mixed,
        )
        for row in rows
    ]


def pooled(states, how):
    return torch.stack([by_hand.pooled(row, how) for row in states])


def terms_by_hand(federation, silo, state, received, batch, options, pooling):
    """L_a, L_b, L_c and the loss of eq. 8, from nothing but parts, rows and options."""
    rows, labels = batch.rows.tolist(), [int(silo.train[silo.name].labels[row]) for row in batch.rows.tolist()]
    g, p = state["global"], state["private"]
    full = forward_by_hand(federation, silo, rows, (0.5, g), (0.5, p))
    only_global = forward_by_hand(federation, silo, rows, (1.0, g))
    only_private = forward_by_hand(federation, silo, rows, (1.0, p))
    averaged = forward_by_hand(federation, silo, rows, (1.0, received["global"]))

    def loss_of(states, head):
        x = pooled(states, pooling).numpy()
        return by_hand.cross_entropy(by_hand.mlp_head(arrays(state[head]), silo.name, x), labels)

    loss_a, loss_b = loss_of(full, "head_full"), loss_of(only_global, "head_global")
    alike = by_hand.cosine if options.get("similarity") == "cosine" else by_hand.cka
    how = options.get("representation", "mean")
    other = full if options.get("private_view") == "full" else only_private
    x, y, z = (pooled(states, how).numpy() for states in (only_global, other, averaged))
    loss_c = alike(x, y) - alike(x, z)
    gamma, mu = options.get("gamma", GAMMA), options.get("mu", MU)
    return loss_a, loss_b, loss_c, (1 - gamma) * loss_a + gamma * loss_b + mu * loss_c


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("task", "pooling"), [("alpha", "first"), ("gamma", "mean")])
def test_loss_and_its_terms_by_hand(name, task, pooling, tiny_federation):
    options = OPTIONS[name]
    words = [*words_of(options), f"head.pooling={pooling}"]
    federation, silo, state, received, batch = set_up(tiny_federation, task, *words)
    (phase,) = federation.training.phases
    step = make_step(federation.training, phase, batch, state, received)
    loss = phase.loss(step)
    loss_a, loss_b, loss_c, total = terms_by_hand(federation, silo, state, received, batch, options, pooling)
    assert float(loss) == pytest.approx(total, abs=1e-10)
    expected = {"full": loss_a}
    if options.get("gamma", GAMMA) > 0:
        expected["backbone"] = loss_b
    if options.get("mu", MU) > 0:
        expected["contrastive"] = loss_c
    assert {name: float(term) for name, term in step.terms.items()} == pytest.approx(expected, abs=1e-10)
    assert abs(loss_c) > 1e-3  # the parts differ enough for the comparison to mean something


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_from_a_steps_own_views_in_numpy(name, tiny_federation):
    options = OPTIONS[name]
    federation, _, state, received, batch = set_up(tiny_federation, "beta", *words_of(options))
    (phase,) = federation.training.phases
    step = make_step(federation.training, phase, batch, state, received)
    views = {view: arrays(readings) for view, readings in step.views.items()}
    gamma, mu = options.get("gamma", GAMMA), options.get("mu", MU)
    labels = batch.labels.tolist()

    def loss_of(view, head):
        return by_hand.cross_entropy(by_hand.mlp_head(arrays(state[head]), "beta", views[view]["mean"]), labels)

    total = (1 - gamma) * loss_of("full", "head_full")
    if gamma:
        total += gamma * loss_of("global", "head_global")
    if mu:
        how = options.get("representation", "mean")
        other = "full" if options.get("private_view") == "full" else "private"
        alike = by_hand.cosine if options.get("similarity") == "cosine" else by_hand.cka
        x, y, z = (views[view][how] for view in ("global", other, "received"))
        total += mu * (alike(x, y) - alike(x, z))
    assert float(phase.loss(step)) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "views"),
    [
        ("paper", {"full", "global", "private", "received"}),
        ("no contrastive loss", {"full", "global"}),
        ("neither", {"full"}),
        ("private view full", {"full", "global", "received"}),
        ("no backbone loss", {"full", "global", "private", "received"}),
    ],
)
def test_no_forward_is_run_for_nothing(name, views, tiny_federation):
    federation = tiny_federation("fedmcp", *words_of(OPTIONS[name]))
    (phase,) = federation.training.phases
    assert phase.views.keys() == views
    assert sorted(phase.trains) == sorted(PARTS)


def test_defaults_are_the_papers(tiny_federation):
    options = tiny_federation("fedmcp").method.options
    assert options.model_dump() == {
        "gamma": 0.5,
        "mu": 0.05,
        "similarity": "cka",
        "representation": "mean",
        "private_view": "alone",
    }


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_batch_too_small_for_cka_learns_from_labels_alone(rows, tiny_federation):
    federation, _, state, received, batch = set_up(tiny_federation, "gamma", *words_of({}), rows=rows)
    (phase,) = federation.training.phases
    leaves = trained(state, phase)
    step = make_step(federation.training, phase, batch, state, received)
    loss = phase.loss(step)
    loss.backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves.values())
    assert (float(step.terms["contrastive"]) == 0) is (rows < 4)


# -- gradient ---------------------------------------------------------------------------------------------------------


def loss_and_gradient(federation, state, received, batch):
    (phase,) = federation.training.phases
    state = dict(state)
    leaves = trained(state, phase)
    loss = phase.loss(make_step(federation.training, phase, batch, state, received))
    loss.backward()
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def loss_at(federation, state, received, batch):
    (phase,) = federation.training.phases
    with torch.no_grad():
        return float(phase.loss(make_step(federation.training, phase, batch, state, received)))


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


@pytest.mark.parametrize("name", ["paper", "cosine of first token", "private view full", "no backbone loss"])
def test_gradient_of_a_whole_step_by_finite_differences(name, tiny_federation):
    words = [*words_of(OPTIONS[name]), "tuner.r=4"]
    federation, _, state, received, batch = set_up(tiny_federation, "gamma", *words, rows=6, micro_batch=4)
    gradient = loss_and_gradient(federation, state, received, batch)
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
                lambda: loss_at(federation, state, received, batch), state[part][tensor], index
            )
            assert numeric == pytest.approx(float(found.view(-1)[index]), rel=1e-5, abs=1e-10), (key, index)
            checked += 1
        assert float(found.view(-1)[largest]) != 0
    assert checked >= (100 if name == "paper" else 30)


def test_the_received_adapter_is_an_anchor(tiny_federation):
    """eq. 5 pulls towards the averaged adapter, which itself gets no gradient and is not changed."""
    federation, _, state, received, batch = set_up(tiny_federation, "gamma", *words_of({}))
    (phase,) = federation.training.phases
    before = {name: tensor.clone() for name, tensor in received["global"].items()}
    trained(state, phase)
    step = make_step(federation.training, phase, batch, state, received)
    assert not any(reading.requires_grad for reading in step.views["received"].values())
    assert all(reading.requires_grad for view in ("full", "global", "private") for reading in step.views[view].values())
    phase.loss(step).backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in received["global"].items())


# -- whole rounds -----------------------------------------------------------------------------------------------------


def kornblith(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return torch.linalg.norm(y.T @ x) ** 2 / (torch.linalg.norm(x.T @ x) * torch.linalg.norm(y.T @ y))


def loss_in_torch(federation, silo, state, received, pooling):
    """The paper's loss over all rows of the silo, through the hand-written forward, differentiable."""
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
    silo.state = federation.training.state_of(silo)
    silo.state.private = {part: state[part] for part in ("private", "head_full", "head_global")}
    result = federation.training.round(silo, {"global": state["global"]}, 1)
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
