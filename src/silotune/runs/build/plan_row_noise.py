"""Set up noise on rows (`privacy.unit`): compute each silo's noise, and refuse settings that exclude it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
from typing_extensions import override

from silotune.communication.masks.fixed_point import threshold_of
from silotune.communication.masks.shared_noise import SharedNoise, common_multiplier
from silotune.communication.privacy.accountant import Privacy, usual_delta
from silotune.communication.privacy.row_accountant import SIMULATED, UNCOVERED, RowAccount, noise_multiplier
from silotune.config import Config, dump
from silotune.core.tensors import State, Tensors, flatten
from silotune.data.batching import make_batch
from silotune.errors import InputError
from silotune.methods.parts import Scope, names_with
from silotune.methods.phase import Phase
from silotune.methods.step import PREVIOUS, LocalTraining, Step, local_training
from silotune.models.forward.mixing import parts_in
from silotune.training.context import TrainingContext
from silotune.training.row_privacy import RowPlan, RowPrivacy, each_alone, units_of
from silotune.training.silo import Silo

V = TypeVar("V")


class _Noting(Mapping[str, V]):
    """A state or a memory that notes the parts that are read, in whatever way; `part_of` returns a key's part."""

    def __init__(self, content: Mapping[str, V], reads: set[str], part_of: Callable[[str], str] = str) -> None:
        self._content, self._reads, self._part_of = content, reads, part_of

    @override
    def __getitem__(self, key: str) -> V:
        self._reads.add(self._part_of(key))
        return self._content[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    @override
    def __len__(self) -> int:
        return len(self._content)

    def copy(self) -> dict[str, V]:
        """Return all as a dictionary."""
        return dict(self)

    def __or__(self, other: Mapping[str, V]) -> dict[str, V]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, V]) -> dict[str, V]:
        return {**other, **self}


def leaving_parts(context: TrainingContext, silo: Silo, every: bool = False) -> frozenset[str]:
    """Return the parts on which what leaves the silo may depend.

    They are all but private parts, and every part that a phase reads while it changes one of them: the list is extended
    until it stops growing, because dependencies carry over rounds. To find what a phase reads, it runs once on one row
    of any silo. In training such a phase is given these parts alone (`RowPrivacy.seen_by`), so that a read which this
    trial did not meet fails instead of leaking. With `every` all parts leave, as the silo's model.
    """
    phases = [phase for phase in context.phases if every or phase.when == "round"]
    alone = each_alone(context.method, phases)
    reads = {phase.name: {*phase.trains, *_reads(context, silo, phase)} for phase in alone}
    leaving = {name for name, part in context.parts.items() if every or part.scope is not Scope.PRIVATE}
    while more := {name for phase in phases if leaving & {*phase.changes} for name in reads[phase.name]} - leaving:
        leaving |= more
    return frozenset(leaving)


def noised_phases(context: TrainingContext, leaving: frozenset[str], every: bool = False) -> frozenset[str]:
    """Return the names of the phases whose gradients need noise: they take steps on rows and change a leaving part."""
    phases = [phase for phase in context.phases if (every or phase.when == "round") and leaving & {*phase.changes}]
    for phase in phases:
        if phase.gathers:
            raise InputError(
                f"privacy.unit: method {context.method.name} sends statistics of rows that are no gradients "
                f"({', '.join(phase.gathers)}); allowed: a method that sends trained parts alone"
            )
    return frozenset(phase.name for phase in phases if phase.trains)


def _reads(context: TrainingContext, silo: Silo, phase: Phase) -> set[str]:
    """Return the parts that a phase reads: in its views, where its parts start, in its loss, and after its steps."""
    reads = {name for mix in phase.views.values() for name in parts_in(mix)}
    shared = context.initial.shared([silo])
    received, everything = context.place(shared), context.place(context.model_state(silo, shared))
    state = cast(State, _Noting(everything, reads))
    previous = flatten({PREVIOUS: flatten({name: everything[name] for name in context.method.remembers})})
    memory = cast(Tensors, _Noting(previous, reads, lambda key: key.split("/")[1]))
    rates = {each.name: context.train.lr for each in context.phases}
    rows = next(iter(silo.train.values()))
    batch = make_batch(rows, rows.sequences([0]), context.backbone.pad_id)
    with torch.no_grad(), local_training(LocalTraining(context.train.lr, dict.fromkeys(rates, 1), rates)):
        for source in phase.start.values():
            if isinstance(source, str):
                reads.add(source)
            else:
                source(state, received)
        for new in phase.then.values():
            new(state)
        if phase.trains:
            mixes = {name: context.resolve(mix, state, received, memory) for name, mix in phase.views.items()}
            views = context.program([mixes], training=True)(batch)
            phase.loss(Step(batch, views, state, received, memory, context.parts, recipe=context.recipe, apart=[]))
    return reads


def covers_models(context: TrainingContext) -> bool:
    """Return whether all that a silo's model holds has noise on rows: all its parts, and nothing else of rows."""
    noise = context.row_privacy
    if noise is None or context.prediction.weighting is not None:  # the model's folder then holds vectors of rows
        return False
    return all(noise.covers(phase) for phase in context.phases if phase.trains or phase.gathers)


def digest_of_run(config: Config, context: TrainingContext) -> str:
    """Return a digest of the configuration and the backbone, on which all noise by a secret depends."""
    return hashlib.sha256(f"{dump(config)}{context.backbone.fingerprint}".encode()).hexdigest()


def plan_row_noise(
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
    delta = privacy.delta or min(usual_delta(len(units_of(silo))) for silo in silos.values())
    every = privacy.parts == "all"
    phases, leaving = _checked_phases(context, next(iter(silos.values())), every)
    settled = RowPrivacy(
        privacy.clip,
        privacy.rows_per_unit,
        {},
        phases,
        secret,
        config.seed,
        digest_of_run(config, context),
        leaving,
        every,
        privacy.rate,
    )
    context.row_privacy = settled
    plans, numbers = {}, range(1, config.rounds + 1)
    noised = [phase for phase in context.phases if settled.covers(phase)]
    participants = [{*choose(number)} for number in numbers]
    for name, silo in silos.items():
        steps, totals = [(phase, context.steps(silo, phase)) for phase in noised], [0]
        for number, silos_of_round in zip(numbers, participants, strict=True):
            own = (count for phase, count in steps if phase.runs_in(number) or phase.also_first)
            totals.append(totals[-1] + (sum(own) if name in silos_of_round else 0))
        if every:
            totals.append(totals[-1] + sum(count for phase, count in steps if phase.when == "end"))
        rate = context.rate_of_units(silo)
        if config.work == "survey":  # its one answer counts every unit
            rate, totals = 1.0, [0, 1]
        needed = common_multiplier if privacy.shares else noise_multiplier
        multiplier = needed(privacy.epsilon, delta, rate, totals[-1])
        colluders = config.aggregation.colluders if privacy.shares else None
        plans[name] = RowPlan(privacy.unit, rate, tuple(totals), multiplier, colluders)
    if privacy.shares:
        settled = replace(settled, shares=_shared_noise(config, context, silos, plans))
    most = max(plans.values(), key=lambda plan: plan.rate**2 * plan.steps[-1])
    account = RowAccount(most.multiplier, most.rate, [*most.steps[1 : config.rounds], most.steps[-1]], delta)
    words = f"gaussian noise on every step, each {privacy.unit}'s gradient clipped to an l2 norm of {privacy.clip:g}"
    if settled.shares is not None:
        words += f", shared out among the silos: ε holds {settled.shares.assumption}"
    guarantee = Privacy(
        account,
        account.total(1),
        words,
        config.rounds,
        config.rounds,
        config.rounds,
        None,
        (*([] if covers_models(context) else [UNCOVERED]), *([] if secret else [SIMULATED])),
    )
    return settled.planned(plans), guarantee


def _shared_noise(
    config: Config, context: TrainingContext, silos: Mapping[str, Silo], plans: Mapping[str, RowPlan]
) -> SharedNoise:
    """Return the noise that silos add together; refuse methods of which a round is more than one step of shared parts.

    The step is the coordinator's: a silo's shared parts stay as it received them, and all that it computes later is of
    them and of its own parts, which have the whole noise.
    """
    shared, method = {*names_with(context.parts, Scope.SHARED)}, context.method
    silo = next(iter(silos.values()))
    for number in method.kinds_of_rounds(context.rounds):
        phases = [phase for phase in context.phases if phase.runs_in(number) or phase.also_first]
        steps = [index for index, phase in enumerate(phases) if shared & {*phase.changes}]
        phase = phases[steps[0]] if steps else None
        if phase is None and shared and 0 < number <= method.options.head_rounds:
            raise InputError(
                "privacy.shares: every round takes one step of shared parts, and in those of method.head_rounds only "
                "private heads train; allowed: method.head_rounds=0 or head.scope=shared"
            )
        refused = {
            "takes no step, or several, of shared parts in a round": (
                phase is None
                or len(steps) > 1
                or context.steps(silo, phase) != 1
                or phase.epochs is not None
                or bool(phase.turns)
            ),
            "changes shared parts by more than a gradient step, or not in every round": phase is not None
            and (bool(shared & {*phase.start, *phase.then}) or phase.skips_first or phase.also_first),
            "goes on from the shared parts after their step": phase is not None
            and any({*phase.trains} & shared & _reads(context, silo, later) for later in phases[steps[0] + 1 :]),
            "keeps shared parts as they were": bool(shared & {*method.remembers}),
        }
        for why, condition in refused.items():
            if condition:
                raise InputError(f"privacy.shares: method {method.name} {why}; allowed: such as fedavg or fedmcp")
    least, plan = config.aggregation.least or threshold_of(len(silos)), next(iter(plans.values()))
    return SharedNoise(plan.multiplier, config.privacy.clip, plan.rate, least, config.aggregation.colluders)


def _checked_phases(context: TrainingContext, silo: Silo, every: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return the phases that are noised, and the parts on which what leaves the silo may depend."""
    method = context.method
    if method.labeled_only:
        raise InputError(f"privacy.unit: no silo trains in method {method.name}; allowed: a method of silos' rows")
    if every and context.prediction.weighting is not None:
        raise InputError(
            f"privacy.parts: the model of method {method.name} holds vectors of rows; allowed: leaving, or "
            "method.weighting=fixed"
        )
    leaving = leaving_parts(context, silo, every)
    phases = noised_phases(context, leaving, every)
    if any(phase.name in phases and not phase.by_row for phase in context.phases):
        raise InputError(
            f"privacy.unit: the loss of method {method.name} couples the rows of a batch; allowed: losses that are "
            "means over rows (FedMCP: method.mu=0 or method.similarity=cosine)"
        )
    for head in context.heads:
        if head.couples_rows:
            raise InputError(
                f"privacy.unit: the loss of head={head.name} couples the rows of a batch; allowed: losses by row, "
                "such as head=retrieval with head.in_batch=false"
            )
    return phases, leaving
