"""Set up noise on rows (`privacy.unit`): compute each silo's noise, and refuse settings that exclude it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from typing_extensions import override

from silotune.communication.privacy.accountant import DELTA, Privacy
from silotune.communication.privacy.row_accountant import RowAccount, noise_multiplier
from silotune.config import Config, dump
from silotune.core.tensors import Tensors
from silotune.data.batching import make_batch
from silotune.errors import InputError
from silotune.methods.parts import Scope
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining, Step, local_training
from silotune.models.forward.mixing import parts_in
from silotune.training.context import TrainingContext
from silotune.training.row_privacy import RowPlan, RowPrivacy
from silotune.training.silo import Silo

V = TypeVar("V")


class _Noting(dict[str, Tensors]):
    """A state that notes the names of the parts that are read."""

    def __init__(self, state: Mapping[str, Tensors]) -> None:
        super().__init__(state)
        self.read: set[str] = set()

    @override
    def __getitem__(self, name: str) -> Tensors:
        self.read.add(name)
        return super().__getitem__(name)

    @override
    def get(self, name: str, default: V = None) -> Tensors | V:  # type: ignore[assignment]
        self.read.add(name)
        return super().get(name, default)


def noised_phases(context: TrainingContext, silo: Silo) -> frozenset[str]:
    """Return the names of the phases whose gradients need noise, so that all that leaves the silo is covered.

    What leaves the silo depends on the shared parts. It also depends on every part that a phase reads while it changes
    a part of this list, so the list is extended until it stops growing: dependencies carry over rounds. A phase needs
    noise if it takes steps on rows and changes a part of the list. To find what a phase reads, it runs once on one row
    of any silo.
    """
    phases = [phase for phase in context.phases if phase.when == "round"]
    reads = {phase.name: set(_reads(context, silo, phase)) for phase in phases}
    leaving = {name for name, part in context.parts.items() if part.scope is Scope.SHARED}
    while more := {name for phase in phases if leaving & {*phase.changes} for name in reads[phase.name]} - leaving:
        leaving |= more
    for phase in phases:
        if phase.gathers and leaving & {*phase.changes}:
            raise InputError(
                f"privacy.unit: method {context.method.name} sends statistics of rows that are no gradients "
                f"({', '.join(phase.gathers)}); allowed: a method that sends trained parts alone"
            )
    return frozenset(phase.name for phase in phases if phase.trains and leaving & {*phase.changes})


def _reads(context: TrainingContext, silo: Silo, phase: Phase) -> Iterator[str]:
    """Yield the parts that a phase reads: in its views, where its parts start, in its loss, and after its steps."""
    yield from (name for mix in phase.views.values() for name in parts_in(mix))
    shared = context.initial.shared([silo])
    state = _Noting(context.place(context.model_state(silo, shared)))
    received = context.place(shared)
    rates = {each.name: context.train.lr for each in context.phases}
    rows = next(iter(silo.train.values()))
    batch = make_batch(rows, rows.sequences([0]), context.backbone.pad_id)
    with torch.no_grad(), local_training(LocalTraining(context.train.lr, dict.fromkeys(rates, 1), rates)):
        for source in phase.start.values():
            if isinstance(source, str):
                yield source
            else:
                source(state, received)
        for new in phase.then.values():
            new(state)
        if phase.trains:
            mixes = {name: context.resolve(mix, state, received, {}) for name, mix in phase.views.items()}
            views = context.program([mixes], training=True)(batch)
            phase.loss(Step(batch, views, state, received, {}, context.parts, recipe=context.recipe, apart=[]))
    yield from state.read


_SIMULATED = "whoever knows the run's seed, from which a simulation draws the noise"


def make_row_privacy(
    config: Config,
    context: TrainingContext,
    silos: Mapping[str, Silo],
    choose: Callable[[int], Sequence[str]],
    secret: bytes | None = None,
) -> tuple[RowPrivacy, Privacy]:
    """Return the noise on rows of each silo whose rows are here, and the guarantee of the run.

    `choose` returns the silos of a round, a public draw. Without a silo's own secret, the run is a simulation, whose
    draws follow from its seed.
    """
    privacy = config.privacy
    assert privacy.epsilon is not None, "the section refuses less"
    assert privacy.unit is not None, "callers look"
    delta = privacy.delta or DELTA
    phases = _checked_phases(context, next(iter(silos.values())))
    settled = RowPrivacy(
        privacy.clip,
        privacy.rows_per_unit,
        {},
        phases,
        secret,
        config.seed,
        hashlib.sha256(f"{dump(config)}{context.backbone.fingerprint}".encode()).hexdigest(),
    )
    context.row_privacy = settled
    plans, numbers = {}, range(1, config.rounds + 1)
    noised = [phase for phase in context.phases if settled.covers(phase)]
    chosen = [{*choose(number)} for number in numbers]
    for name, silo in silos.items():
        steps, taken = [(phase, context.steps(silo, phase)) for phase in noised], [0]
        for number, silos_of_round in zip(numbers, chosen, strict=True):
            own = (count for phase, count in steps if phase.runs_in(number) or phase.also_first)
            taken.append(taken[-1] + (sum(own) if name in silos_of_round else 0))
        rate = context.rate_of_units(silo)
        multiplier = noise_multiplier(privacy.epsilon, delta, rate, taken[-1])
        plans[name] = RowPlan(privacy.unit, rate, tuple(taken), multiplier)
    most = max(plans.values(), key=lambda plan: plan.rate**2 * plan.steps[-1])
    account = RowAccount(most.multiplier, most.rate, list(most.steps[1:]), delta)
    words = f"gaussian noise on every step, each {privacy.unit}'s gradient clipped to an l2 norm of {privacy.clip:g}"
    guarantee = Privacy(
        account,
        account.total(1),
        words,
        config.rounds,
        config.rounds,
        config.rounds,
        None,
        ("users of a silo's own model", *([] if secret else [_SIMULATED])),
    )
    return settled.planned(plans), guarantee


def _checked_phases(context: TrainingContext, silo: Silo) -> frozenset[str]:
    method = context.method
    if method.server_phases() or method.labeled_only:
        raise InputError(
            f"privacy.unit: the coordinator's labeled rows of method {method.name} come from silos without noise; "
            "allowed: a method without them"
        )
    phases = noised_phases(context, silo)
    if any(phase.name in phases and not phase.by_row for phase in context.phases):
        raise InputError(
            f"privacy.unit: the loss of method {method.name} couples the rows of a batch; allowed: losses that are "
            "means over rows (FedMCP: method.mu=0 or method.similarity=cosine)"
        )
    return phases
