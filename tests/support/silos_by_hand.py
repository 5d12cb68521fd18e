"""Two or three silos in float64, run as an engine runs them, and the means and losses of their rounds by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from silotune.aggregation import Update, score_read_by
from silotune.core.tensors import copy, flatten
from silotune.methods.parts import Scope, names_with
from silotune.training.silo import SiloState
from tests.support.numeric_rig import doubled, random_parts
from tests.support.rounds_by_hand import WORDS, shared_of, states

ROWS, SCALE = 6, 6 / 4
TWO = (
    *("data.tasks=[alpha]", "partition=iid", "partition.silos=2", "head=linear", "head.scope=shared"),
    *("tuner=lora", "tuner.alpha=6", "aggregation=uniform", "aggregation.outlier=null"),
)


def set_up(tiny_federation, method, *words):
    """Return a federation of two silos in float64, and each silo's whole state; shared parts are equal."""
    federation = doubled(tiny_federation(method, *WORDS, *TWO, *words))
    wholes, shared = {}, None
    for seed, silo in enumerate(federation.silos.values()):
        rows = silo.train["alpha"]
        silo.train["alpha"] = replace(rows, ids=rows.ids[:ROWS], types=rows.types[:ROWS], labels=rows.labels[:ROWS])
        whole = random_parts(federation, silo, seed)
        shared = shared or shared_of(federation, whole)
        wholes[silo.name] = whole | shared
        silo.state = SiloState({name: whole[name] for name in names_with(federation.context.parts, Scope.PRIVATE)})
    federation.coordinator.shared = {name: copy(tensors) for name, tensors in shared.items()}
    return federation, wholes


def run_rounds(federation, rounds=2, sampled=None):
    """Run rounds as an engine does, but for the bytes, which are float32; `sampled` names each round's silos."""
    rounds = len(sampled) if sampled else rounds
    coordinator, private = federation.coordinator, names_with(federation.context.parts, Scope.PRIVATE)
    for number in range(1, rounds + 1):
        updates = []
        for silo in [federation.silos[name] for name in (sampled[number - 1] if sampled else federation.silos)]:
            received = coordinator.shared_of(silo.name)
            result = federation.trainer.rounds([silo], received, number)[0]
            silo.state = SiloState({name: result.state[name] for name in private}, result.memory)
            sent = flatten({name: result.state[name] for name in federation.method.sends(number)})
            own = None if received is coordinator.shared else flatten(received)
            score = result.metrics.get(score_read_by(federation.config.aggregation.name))
            updates.append(Update(silo.name, sent, silo.rows, own, score))
        if coordinator.communicates:
            coordinator.aggregate(updates, number)


def assert_models(federation, wholes):
    """Compare shared parts and every silo's private parts."""
    for silo in federation.silos.values():
        found = federation.coordinator.shared | silo.state.private | federation.context.fixed
        torch.testing.assert_close(found, wholes[silo.name], rtol=0, atol=1e-9)


def scaled(weight):
    """Return a weight, or a function of a module and its input, times alpha / r."""
    return (lambda module, x: SCALE * weight(module, x)) if callable(weight) else SCALE * weight


def loss_of(federation, name, head, *loras):
    """Return the cross-entropy of a linear head over the mean state, under `(weight, LoRA)` pairs."""
    silo = federation.silos[name]
    found = states(federation, silo, loras=[(scaled(weight), tensors) for weight, tensors in loras])
    pooling = federation.method.setting.head.pooling
    x = torch.stack([row.mean(0) if pooling == "mean" else row[0] for row in found])
    logits, labels = x @ head["alpha.out.weight"].T + head["alpha.out.bias"], silo.train["alpha"].labels
    return (torch.logsumexp(logits, -1) - logits[torch.arange(len(labels)), labels]).mean()


def constant(tensors):
    return {name: tensor.detach() for name, tensor in tensors.items()}


def averaged(wholes, names, beta=1.0, before=None):
    """Set shared parts of all states to their mean, or go β of the way to it from before."""
    for part in names:
        first = next(iter(wholes.values()))[part]
        for name in first:
            mean = sum(whole[part][name] for whole in wholes.values()) / len(wholes)
            if before is not None:
                mean = (1 - beta) * before[part][name] + beta * mean
            for whole in wholes.values():
                whole[part] = whole[part] | {name: mean}
