"""Local rounds: one silo's, or those of several silos (a cohort) whose batches go through the backbone together.

What a silo does is the same either way: its own batches in its own order, its own loss over its own views, its own
gradients, because its parts are leaves of their own. In a cohort it ends with the numbers it would end with alone, to
rounding: matrix products have other shapes. A silo with fewer steps leaves the cohort when it is done.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from silotune.core import tensors as part_tools
from silotune.core.randomness import Stream
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.data.cohort_batches import CohortMicroBatch
from silotune.errors import Diverged
from silotune.methods.base import PREVIOUS, Phase, Step
from silotune.methods.parts import Scope
from silotune.models.forward.view_cache import ConstantViewCache
from silotune.training.context import TrainingContext
from silotune.training.optimizer import make_optimizer
from silotune.training.silo import Silo


@dataclass
class LocalResult:
    """A finished local round: all parts, what to keep, and numbers and a remark for the log."""

    state: State
    memory: Tensors
    metrics: dict[str, float]
    note: str = ""


@dataclass
class _Local:
    """A silo's local round under way."""

    silo: Silo
    state: State
    received: State
    memory: Tensors
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sum of each loss term."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of steps that logged the term."""
    view_cache: ConstantViewCache = field(default_factory=ConstantViewCache)
    note: str = ""
    steps: int = 0
    rows: int = 0
    real: int = 0
    padded: int = 0

    def enters(self, phase: Phase) -> bool:
        """Whether it takes part in a phase: one may pass over silos that were never sampled."""
        first = not any(key.startswith(f"{PREVIOUS}/") for key in self.memory)
        if phase.skips_first and first:
            self.note = f"first participation: no {phase.name!r} phase, received parts are kept"
            return False
        return True

    def begin(self, phase: Phase) -> list[Tensor]:
        """Set the phase's parts to where it starts, as leaves; those leaves."""
        for target, source in phase.start.items():
            self.state[target] = part_tools.copy(self.state[source])
        for name in phase.trains:
            self.state[name] = {key: tensor.clone().requires_grad_() for key, tensor in self.state[name].items()}
        return [tensor for name in phase.trains for tensor in self.state[name].values()]

    def end(self) -> None:
        """After a phase nothing has a gradient."""
        self.state = {name: part_tools.copy(tensors) for name, tensors in self.state.items()}

    def count(
        self, batch: Batch, terms: Mapping[str, float], micro_batches: Sequence[CohortMicroBatch], member: int
    ) -> None:
        """Add a step to the numbers."""
        self.steps, self.rows = self.steps + 1, self.rows + len(batch)
        masks = [
            piece.inputs["attention_mask"]
            for joint in micro_batches
            for piece in joint.slices
            if piece.batch_index == member
        ]
        self.real += sum(int(mask.sum()) for mask in masks)
        self.padded += sum(mask.numel() for mask in masks)
        for term, value in terms.items():
            self.sums[term] += value
            self.counts[term] += 1

    def result(self, remembers: Sequence[str], seconds: float) -> LocalResult:
        """What the round ended with."""
        metrics = {term: value / self.counts[term] for term, value in self.sums.items()}
        metrics |= {"steps": self.steps, "rows": self.rows}
        metrics |= {"real_tokens": self.real, "padded_tokens": self.padded, "seconds": seconds}
        remembered = {
            f"{PREVIOUS}/{name}/{key}": tensor
            for name in remembers
            for key, tensor in part_tools.copy(self.state[name]).items()
        }
        state = {name: on(tensors, torch.device("cpu")) for name, tensors in self.state.items()}
        return LocalResult(state, on(self.memory | remembered, torch.device("cpu")), metrics, self.note)


def train(
    context: TrainingContext,
    silos: Sequence[Silo],
    shared: State,
    number: int,
    phases: Sequence[Phase],
) -> list[LocalResult]:
    """The phases in order, in all silos at once; results in the silos' order.

    The time is divided among silos by their rows.

    Raises:
        Diverged: naming the silo.
    """
    started = time.perf_counter()
    device = context.backbone.device
    received = {name: on(shared[name], device) for name in shared}
    runs = []
    for silo in silos:
        own = context.state_of(silo)
        state: State = {
            name: on((shared if part.scope is Scope.SHARED else own.private).get(name, {}), device)
            for name, part in context.parts.items()  # a part without tensors leaves no trace in messages and files
        }
        runs.append(_Local(silo, state, received, on(own.memory, device)))
    for phase in phases:
        members = [run for run in runs if run.enters(phase)]
        leaves = [run.begin(phase) for run in members]
        members = [run for run, own in zip(members, leaves, strict=True) if own]  # else a head with nothing to train
        if members:
            # Optimizers work tensor by tensor: one for all does to each silo's what its own would.
            optimizer = make_optimizer(context.train, [tensor for own in leaves for tensor in own])
            _train_phase(context, members, phase, number, optimizer)
            for run in members:
                run.end()
    seconds, rows = time.perf_counter() - started, sum(run.rows for run in runs)
    shares = [run.rows / rows if rows else 1 / len(runs) for run in runs]
    return [run.result(context.method.remembers, seconds * share) for run, share in zip(runs, shares, strict=True)]


def _train_phase(
    context: TrainingContext, members: Sequence[_Local], phase: Phase, number: int, optimizer: torch.optim.Optimizer
) -> None:
    own_micro_batches = len(members) == 1
    batches = [context.batches(run.silo, phase, number, own_micro_batches) for run in members]
    for run in members:
        run.view_cache = context.view_cache(phase)
    for taken, found in enumerate(_in_step(batches)):  # other phases leave no trace in draws
        active = [(members[place], batch) for place, batch in found]
        micro_batches = context.cohort_micro_batches([batch for _, batch in active], phase)
        losses, terms = _losses(context, active, micro_batches, phase, number, taken)
        for (run, _), own in zip(active, terms, strict=True):
            if not math.isfinite(own["loss"]):
                raise Diverged(
                    f"silo {run.silo.name!r}, round {number}, phase {phase.name!r}: training diverged, the loss is "
                    f"{own['loss']} (train.lr is {context.train.lr:g})"
                )
        optimizer.zero_grad(set_to_none=True)  # and so a silo that has left stays as it is
        torch.autograd.backward(losses)
        optimizer.step()
        for member, ((run, batch), own) in enumerate(zip(active, terms, strict=True)):
            run.count(batch, own, micro_batches, member)


def _in_step(batches: Sequence[Iterator[Batch]]) -> Iterator[list[tuple[int, Batch]]]:
    """The first batches of all, then the second ones of those that have one, and so on."""
    while True:
        drawn = [(place, next(own, None)) for place, own in enumerate(batches)]
        found = [(place, batch) for place, batch in drawn if batch is not None]
        if not found:
            return
        yield found


def _losses(
    context: TrainingContext,
    active: Sequence[tuple[_Local, Batch]],
    micro_batches: Sequence[CohortMicroBatch],
    phase: Phase,
    number: int,
    taken: int,
) -> tuple[list[Tensor], list[dict[str, float]]]:
    """Each silo's loss of its batch, and what is logged of it as numbers."""
    streams = [Stream(context.seed, "dropout", run.silo.name, number, phase.name, taken) for run, _ in active]
    mixes = [
        {name: context.resolve(mix, run.state, run.received, run.memory) for name, mix in phase.views.items()}
        for run, _ in active
    ]
    own_micro_batches = len(active) == 1
    losses, terms = [], []
    with streams[0] if own_micro_batches else nullcontext():
        batches, caches = [batch for _, batch in active], [run.view_cache for run, _ in active]
        views = context.views(batches, micro_batches, mixes, [] if own_micro_batches else streams, caches)
        for (run, batch), own, stream in zip(active, views, streams, strict=True):
            step = Step(batch, own, run.state, run.received, run.memory, context.parts)
            with nullcontext() if own_micro_batches else stream:
                losses.append(phase.loss(step))
            terms.append({"loss": losses[-1].detach(), **step.terms})
    return losses, _numbers(terms)


def _numbers(terms: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Scalars as numbers, fetched from the device at once."""
    flat = torch.stack([term.double().reshape(()) for own in terms for term in own.values()])
    values = iter(flat.tolist())
    return [{name: next(values) for name in own} for own in terms]


def on(tensors: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """On the device and in name order: a loss that sums over a part's tensors gives the same bits after a resume."""
    return {name: tensor.detach().to(device) for name, tensor in sorted(tensors.items())}
