"""Whole local rounds by hand: a hand-written BERT, losses in plain torch, gradient descent on all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from silotune.methods.parts import Scope, names_with
from tests.support.fedmcp_rig import forward_by_hand, pooled
from tests.support.numeric_rig import doubled, random_parts

LR, ROWS = 0.3, 24
WORDS = ("train.batch_size=64", "train.steps=2", "train.optimizer=sgd", f"train.lr={LR}", "tuner.r=4")
"""Every silo of the tiny data fits into one batch."""

State = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Stage:
    """One phase: the parts it trains, its loss from all parts, and how many steps it takes."""

    trains: Sequence[str]
    loss: Callable[[State], torch.Tensor]
    steps: int = 2


def set_up(tiny_federation, method, *words, task="gamma"):
    """Return a federation in float64, a silo whose private parts are random, and its whole state."""
    federation = doubled(tiny_federation(method, *WORDS, *words))
    silo = federation.silos[task]
    (rows,) = silo.train.values()  # fewer of them: the hand-written BERT reads one at a time
    silo.train[task] = replace(rows, ids=rows.ids[:ROWS], types=rows.types[:ROWS], labels=rows.labels[:ROWS])
    state = random_parts(federation, silo)
    silo.state = federation.context.state_of(silo)
    silo.state.private = {name: state[name] for name in names_with(federation.context.parts, Scope.PRIVATE)}
    return federation, silo, state


def shared_of(federation, state):
    """Return the shared parts of a state, which a broadcast would bring."""
    return {name: state[name] for name in names_with(federation.context.parts, Scope.SHARED)}


def states(federation, silo, *adapters, loras=()):
    """Return the last states of all the silo's rows under a mix of adapters."""
    return forward_by_hand(federation, silo, range(silo.rows), *adapters, loras=loras)


def cross_entropy(federation, silo, states, head):
    """Return the cross-entropy of the MLP head, averaged over the silo's rows."""
    labels = silo.train[silo.name].labels
    x = pooled(states, federation.method.setting.head.pooling)
    hidden = torch.tanh(x @ head[f"{silo.name}.dense.weight"].T + head[f"{silo.name}.dense.bias"])
    logits = hidden @ head[f"{silo.name}.out.weight"].T + head[f"{silo.name}.out.bias"]
    return (torch.logsumexp(logits, -1) - logits[torch.arange(len(labels)), labels]).mean()


def descended(state: State, stages: Sequence[Stage]) -> State:
    """Return the parts after gradient descent through all stages; each stage changes only the parts it trains."""
    for stage in stages:
        for _ in range(stage.steps):
            current = dict(state)
            for part in stage.trains:
                current[part] = {name: t.detach().clone().requires_grad_() for name, t in state[part].items()}
            keys = [(part, name) for part in stage.trains for name in current[part]]
            gradients = torch.autograd.grad(stage.loss(current), [current[part][name] for part, name in keys])
            state = state | {part: dict(state[part]) for part in stage.trains}
            for (part, name), gradient in zip(keys, gradients, strict=True):
                state[part][name] = state[part][name] - LR * gradient
    return state


def assert_same(state: State, expected: State, moved_from: State, moved: Sequence[str]) -> None:
    """Assert equality up to rounding, and that exactly the parts in `moved` have left their start."""
    assert state.keys() == expected.keys()
    for part, tensors in expected.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(state[part][name], tensor, rtol=0, atol=1e-9)
            if part in moved:
                assert (state[part][name] - moved_from[part][name]).abs().max() > 1e-7, (part, name)
            else:
                assert torch.equal(state[part][name], moved_from[part][name])
