"""Three rounds of SCAFFOLD, FedDyn and FedProto with sampled silos, recomputed outside silotune in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from silotune.core.tensors import flatten, unflatten
from tests.support.rounds_by_hand import LR, states
from tests.support.silos_by_hand import SCALE, assert_models, loss_of, run_rounds, set_up

STEPS = 2
THREE = ("partition.silos=3", "method.adapters=1")


def sampled_of(wholes):
    """Rounds of two, two and one of three silos; the first one twice, so that it comes back with what it kept."""
    first, second, third = wholes
    return [(first, second), (first, third), (second,)]


def with_prefix(whole, *parts):
    return flatten({part: whole[part] for part in parts})


def gradients(federation, name, theta, loss=None):
    """The gradient of a silo's cross-entropy, or of another loss of all parts, at a flat θ."""
    leaves = {key: tensor.detach().clone().requires_grad_() for key, tensor in theta.items()}
    parts = unflatten(leaves)
    value = loss(parts) if loss else loss_of(federation, name, parts["head"], (1, parts["global"]))
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def test_scaffold(tiny_federation):
    federation, wholes = set_up(tiny_federation, "scaffold", *THREE, "server.lr=0.7")
    sampled = sampled_of(wholes)
    run_rounds(federation, sampled=sampled)
    some = next(iter(wholes.values()))
    x = with_prefix(some, "global", "head")
    part_of = {key: key.split("/", 1) for key in x}
    c = {key: some[f"{part}_c"][name] for key, (part, name) in part_of.items()}
    c_own = {
        silo: {key: whole[f"{part}_c_own"][name] for key, (part, name) in part_of.items()}
        for silo, whole in wholes.items()
    }
    for chosen in sampled:
        trained, changes = [], []
        for silo in chosen:
            y, c_i = x, c_own[silo]
            for _ in range(STEPS):
                g = gradients(federation, silo, y)
                y = {key: y[key] - LR * (g[key] - c_i[key] + c[key]) for key in x}
            new = {key: c_i[key] - c[key] + (x[key] - y[key]) / (STEPS * LR) for key in x}
            trained.append(y)
            changes.append({key: new[key] - c_i[key] for key in x})
            c_own[silo] = new
        x = {key: x[key] + 0.7 * (sum(y[key] for y in trained) / len(chosen) - x[key]) for key in x}
        c = {key: c[key] + sum(change[key] for change in changes) / len(wholes) for key in x}
    for silo in wholes:
        own = {f"{part}_c_own/{name}": c_own[silo][key] for key, (part, name) in part_of.items()}
        common = {f"{part}_c/{name}": c[key] for key, (part, name) in part_of.items()}
        wholes[silo] = unflatten(x | common | own)
    assert_models(federation, wholes)


def test_scaffold_with_a_schedule_divides_by_the_sum_of_the_rates(tiny_federation):
    """Without control variates, c_i becomes the mean gradient, each weighed by the rate of its step."""
    federation, wholes = set_up(tiny_federation, "scaffold", *THREE, "train.schedule=linear")
    (silo, whole), *_ = wholes.items()
    for tensors in [federation.coordinator.shared, federation.silos[silo].state.private]:
        for part in tensors:
            if "_c" in part:
                tensors[part] = {name: torch.zeros_like(tensor) for name, tensor in tensors[part].items()}
    run_rounds(federation, sampled=[(silo,)])
    y, rates, total = with_prefix(whole, "global", "head"), (LR, LR / 2), {}
    for rate in rates:
        g = gradients(federation, silo, y)
        y = {key: y[key] - rate * g[key] for key in y}
        total = {key: total.get(key, 0) + rate * g[key] / sum(rates) for key in y}
    kept = federation.silos[silo].state.private
    for key, mean in total.items():
        part, name = key.split("/", 1)
        torch.testing.assert_close(kept[f"{part}_c_own"][name], mean, rtol=0, atol=1e-9)


def test_feddyn(tiny_federation):
    alpha = 0.4
    federation, wholes = set_up(tiny_federation, "feddyn", *THREE, f"method.alpha={alpha}")
    sampled = sampled_of(wholes)
    run_rounds(federation, sampled=sampled)
    some = next(iter(wholes.values()))
    theta = with_prefix(some, "global", "head")
    part_of = {key: key.split("/", 1) for key in theta}
    h = {key: torch.zeros_like(tensor) for key, tensor in theta.items()}
    kept = {
        silo: {key: whole[f"{part}_gradient"][name] for key, (part, name) in part_of.items()}
        for silo, whole in wholes.items()
    }
    for chosen in sampled:
        trained = []
        for silo in chosen:
            own = theta
            for _ in range(STEPS):
                g = gradients(federation, silo, own)
                own = {
                    key: own[key] - LR * (g[key] - kept[silo][key] + alpha * (own[key] - theta[key])) for key in theta
                }
            kept[silo] = {key: kept[silo][key] - alpha * (own[key] - theta[key]) for key in theta}
            trained.append(own)
        h = {key: h[key] - alpha * sum(own[key] - theta[key] for own in trained) / len(wholes) for key in theta}
        theta = {key: sum(own[key] for own in trained) / len(chosen) - h[key] / alpha for key in theta}
    for silo in wholes:
        gradient = {f"{part}_gradient/{name}": kept[silo][key] for key, (part, name) in part_of.items()}
        wholes[silo] = unflatten(theta | gradient)
    assert_models(federation, wholes)
    state = federation.coordinator.flat().items()
    state = {name.removeprefix("part/"): tensor for name, tensor in state if name.startswith("part/")}
    torch.testing.assert_close(state, h, rtol=0, atol=1e-9)


def test_fedproto(tiny_federation):
    lam = 0.8
    federation, wholes = set_up(
        tiny_federation, "fedproto", *THREE, "head.scope=private", f"method.lam={lam}", "method.representation=mean"
    )
    sampled = sampled_of(wholes)
    last = sampled[1][1]  # has rows of one class alone
    rows = federation.silos[last].train["alpha"]
    federation.silos[last].train["alpha"] = replace(rows, labels=torch.zeros_like(rows.labels))
    classes = len(rows.task.labels)
    known = torch.tensor([1.0, *[0.0] * (classes - 1)], dtype=torch.float64)
    prototypes = next(iter(wholes.values()))["prototypes"]["prototypes"] * known[:, None]
    counts = known * 5
    federation.coordinator.shared["prototypes"] = {"prototypes": prototypes, "rows": counts}

    def representations(silo, adapter):
        found = states(federation, federation.silos[silo], loras=[(SCALE, adapter)])
        return torch.stack([row.mean(0) for row in found])

    def loss(silo, prototypes, counts, parts):
        labels = federation.silos[silo].train["alpha"].labels
        apart = (representations(silo, parts["private"]) - prototypes[labels]).square().mean(-1)
        distance = (apart * (counts[labels] > 0)).mean()
        return loss_of(federation, silo, parts["head"], (1, parts["private"])) + lam * distance

    for chosen in sampled:
        means, numbers = [], []
        for silo in chosen:
            own = with_prefix(wholes[silo], "private", "head")
            for _ in range(STEPS):
                g = gradients(federation, silo, own, partial(loss, silo, prototypes, counts))
                own = {key: own[key] - LR * g[key] for key in own}
            wholes[silo] = wholes[silo] | unflatten(own)
            z, labels = representations(silo, wholes[silo]["private"]), federation.silos[silo].train["alpha"].labels
            numbers.append(torch.stack([(labels == label).sum().double() for label in range(classes)]))
            sums = torch.stack([z[labels == label].sum(0) for label in range(classes)])
            means.append(sums / numbers[-1].clamp(min=1)[:, None])
        total = sum(numbers)
        mean = sum(n[:, None] * m for n, m in zip(numbers, means, strict=True)) / total.clamp(min=1)[:, None]
        prototypes = torch.where(total[:, None] > 0, mean, prototypes)
        counts = torch.where(total > 0, total, counts)
    for silo in wholes:
        wholes[silo] = wholes[silo] | {"prototypes": {"prototypes": prototypes, "rows": counts}}
    run_rounds(federation, sampled=sampled)
    assert_models(federation, wholes)
