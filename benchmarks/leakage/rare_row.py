"""Read one row's gradient by a broadcast whose head is sure of the label that all other rows have.

Where the model is sure of a row's label, that row hardly moves the update. So of a silo with one row of another label,
the update is that row's gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.leakage.one_silo import OneSilo, demo, private
from silotune.core.tensors import State
from silotune.data.batching import evaluation_batches
from silotune.evaluation.predict import Predictor
from silotune.training.federation import Federation

ROWS = 60


def measure(seed: int) -> dict[str, float]:
    """Return the cosines for one, five and 20 rows of the second label."""
    cosines = {count: attack(demo(seed, "head.scope=shared"), ROWS, count) for count in (1, 5, 20)}
    noised = attack(demo(seed, "head.scope=shared", *private(1)), ROWS, 1)
    named = {f"{count} rare rows, {key}": value for count, each in cosines.items() for key, value in each.items()}
    return named | {f"private, 1 rare row, {key}": value for key, value in noised.items()}


def attack(federation: Federation, count: int, rare: int) -> dict[str, float]:
    """Return the update's cosine with the rare rows' mean gradient, under an honest and under a sure broadcast."""
    silo = OneSilo.of(federation, count)
    labels = torch.zeros_like(silo.rows.labels)
    labels[:rare] = 1
    silo = replace(silo, rows=replace(silo.rows, labels=labels))
    cosines = {}
    for name, shared in (("honest", silo.start()), ("sure", sure_head(federation))):
        own = silo.gradients(shared, range(rare)).mean(0)
        cosines[f"{name} cosine"] = float(torch.cosine_similarity(silo.change(shared), own, dim=0))
    return cosines


def sure_head(federation: Federation) -> State:
    """Return shared parts whose linear head gives the first label to whatever text the public backbone reads."""
    shared = {part: dict(tensors) for part, tensors in federation.coordinator.shared.items()}
    silo = next(iter(federation.silos.values()))
    (evaluation,) = silo.evaluations.values()
    (head,) = (part for part, tensors in shared.items() if any(key.endswith("out.bias") for key in tensors))
    weight, bias = (next(key for key in shared[head] if key.endswith(f"out.{name}")) for name in ("weight", "bias"))
    directions = torch.sign(_mean_state(federation, shared, head, weight, evaluation.test))
    shared[head][weight] = torch.stack([0.8 * directions, -0.8 * directions])
    shared[head][bias] = shared[head][bias] + torch.tensor([0.9, -0.9])
    return shared


def _mean_state(federation: Federation, shared: State, head: str, weight: str, rows: object) -> Tensor:
    """Return the mean of what the head reads over some rows, one coordinate after the other."""
    context = federation.context
    silo = next(iter(federation.silos.values()))
    state = shared | context.state_of(silo).private
    batch = next(evaluation_batches(rows, federation.backbone.pad_id))  # type: ignore[arg-type]
    means = []
    for column in range(shared[head][weight].shape[1]):
        probe = {key: torch.zeros_like(tensor) for key, tensor in shared[head].items()}
        probe[weight][0, column] = 1
        means.append(float(Predictor(context, state | {head: probe}).logits(batch)[:, 0].mean()))
    return torch.tensor(means)
