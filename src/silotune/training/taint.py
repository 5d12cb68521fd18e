"""Find the phases that need noise on rows: they read rows and change parts that influence what leaves a silo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.batching import make_batch
from silotune.errors import InputError
from silotune.methods.parts import Scope
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining, Step, local_training
from silotune.models.forward.mixing import parts_in
from silotune.training.context import TrainingContext
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
    noise if it takes steps on rows and changes a part of the list. To find what a phase reads, it runs once on one row.

    Args:
        context: the method's parts and phases.
        silo: any silo with rows.

    Raises:
        InputError: such a phase passes rows into a part without a gradient.
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
