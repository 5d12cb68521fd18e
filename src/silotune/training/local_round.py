"""Run a local round of one silo or of a cohort: phases, optimizer steps, the new state and metrics.

A silo does the same either way: it has its own batches in its own order, its own loss over its own views, and its own
gradients, because its parts are leaves of their own. In a cohort its result is the one it would have alone, up to
rounding, because matrix products have other shapes. A silo with fewer steps leaves the cohort when it is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

import torch

from silotune.config import TrainConfig
from silotune.core.tensors import State
from silotune.errors import Diverged
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining, Named
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import ConstantViews
from silotune.training.context import TrainingContext
from silotune.training.noised_steps import NoisedSteps
from silotune.training.phase_batches import joining, phase_batches
from silotune.training.phase_optimizer import PhaseOptimizer, Schedule
from silotune.training.row_privacy import each_alone
from silotune.training.silo import Silo
from silotune.training.silo_round import LocalResult, LocalRound
from silotune.training.step_gradients import StepGradients


def train(
    context: TrainingContext,
    silos: Sequence[Silo],
    shared: State,
    number: int,
    phases: Sequence[Phase],
    settings: TrainConfig | None = None,
) -> list[LocalResult]:
    """Run phases in order, in all silos at once.

    The optimizer's settings are the context's, unless others are given.

    Returns:
        One result per silo, in the order of `silos`. The time is divided among silos by their rows.

    Raises:
        Diverged: a silo's loss is not finite, and no rows have noise.
    """
    started, settings = time.perf_counter(), settings or context.train
    received = context.place(shared)
    constant = context.constant_parts
    in_common = context.place({name: part for name, part in shared.items() if name in constant})
    runs, privacy = [], context.row_privacy
    for silo in silos:
        before = context.state_of(silo)
        every_part = shared | before.private | context.initial.at_rank(context.fixed, silo.name)
        # a part without tensors leaves no trace in messages and files
        own = {name: every_part.get(name, {}) for name in context.parts if name not in constant}
        placed = context.place(own) | in_common
        state = {name: placed[name] for name in context.parts}
        training = _local_training(context, settings, silo, number, phases)
        place = number if any(phase.when == "round" for phase in phases) else context.rounds + 1
        stream = None if privacy is None else privacy.stream(silo, place, shared, before)
        runs.append(LocalRound(silo, state, received, context.backbone.place(before.memory), training, stream, privacy))
    for phase in [phase for phase in phases if phase.trains and phase.when == "round"][: int(context.measures)]:
        for run in runs:
            run.measure(context, phase, number)
    for phase in phases if privacy is None else each_alone(context.method, phases):
        members = [run for run in runs if run.enters(phase, number, context.views_draw)]
        leaves = [run.begin(phase) for run in members]
        for run in members if phase.gathers else ():
            run.gather(context, phase, number)
        # Nothing to train: a head without tensors, or a phase that only sets parts.
        members = [run for run, tensors in zip(members, leaves, strict=True) if tensors]
        if members:
            backbone, trained = context.backbone, [tensors for tensors in leaves if tensors]
            schedules = [_schedule(context, settings, run.silo, number, phase) for run in members]
            scaled = backbone.precision == "fp16"
            optimizer = PhaseOptimizer(settings, trained, schedules, backbone.device, scaled, context.rate_factor)
            keep = settings.keep_optimizer and phase.when == "round"
            for index, run in enumerate(members if keep else []):
                optimizer.restore(index, phase.name, run.memory)
            if privacy is not None and privacy.covers(phase):
                for index, run in enumerate(members):
                    assert run.stream is not None, "drawn from where rows have noise"
                    steps = NoisedSteps(context, run.silo, phase, run.stream, run.seen_by(phase)[-1], number)
                    _train_with_noise(steps, run, optimizer, index)
            else:
                _train_phase(_PhaseWork(context, members, phase, number), optimizer)
            for index, run in enumerate(members if keep else []):
                run.memory = run.memory | optimizer.state(index, phase.name)
            for run, skipped in zip_longest(members, optimizer.skipped()):
                run.end(context.constant_parts, skipped)
    seconds, rows = time.perf_counter() - started, sum(run.rows for run in runs)
    parts = [seconds * run.rows / rows if rows else seconds / len(runs) for run in runs]
    return [run.result(context.method.remembers, part) for run, part in zip(runs, parts, strict=True)]


def _schedule(context: TrainingContext, settings: TrainConfig, silo: Silo, number: int, phase: Phase) -> Schedule:
    """Return the learning rates of a silo's steps in a phase."""
    rounds = context.rounds if phase.when == "round" else None
    settings = settings if phase.lr is None else settings.with_lr(phase.lr)
    return Schedule.of(settings, context.steps(silo, phase), number, rounds)


def _local_training(
    context: TrainingContext, settings: TrainConfig, silo: Silo, number: int, phases: Sequence[Phase]
) -> LocalTraining:
    """Return a silo's learning rate and number of steps, which its method may read."""
    trained = [phase for phase in phases if phase.trains]
    steps = {phase.name: context.steps(silo, phase) for phase in trained}
    rates = {phase.name: _schedule(context, settings, silo, number, phase).rate for phase in trained}
    sums = {name: sum(map(rate, range(steps[name]))) for name, rate in rates.items()}
    return LocalTraining(settings.lr, Named("number of steps of phase", steps), Named("sum of rates of phase", sums))


class _PhaseWork:
    """Objects that all steps of a phase share: batches, the program of its views, and the way to gradients."""

    def __init__(self, context: TrainingContext, members: Sequence[LocalRound], phase: Phase, number: int) -> None:
        self._context, self.members, self.phase, self.number = context, members, phase, number
        self._alone = len(members) == 1
        self.batches = [phase_batches(context, run.silo, phase, number, self._alone) for run in members]
        self.gradients = StepGradients(context, phase)
        self.lr = context.train.lr
        self.quiet = context.row_privacy is not None
        """Whether a loss that is not finite ends nothing: an answer that is missing would tell of rows."""
        self._constant = context.constant_views(phase)
        for run in members:
            run.constants = ConstantViews(self._constant)
        # Under dropout equal parts do not make equal views.
        self._same = {} if context.views_draw else phase.same_at_start
        self._renewed = phase.renews_mixes
        self._compiled_for: tuple[object, ...] = ()
        self.prepare(0, range(len(members)))

    def prepare(self, step: int, active: Sequence[int]) -> None:
        """Compile the views for a step, unless they are as in the last one."""
        key = tuple(active), bool(self._same) and step == 0, step if self._renewed else 0
        if key == self._compiled_for:
            return
        self._compiled_for = key
        context, phase, runs = self._context, self.phase, [self.members[index] for index in active]
        equal = [bool(self._same) and step == 0 and run.starts_as_received for run in runs]
        mixes = [run.mixes(context, phase, same) for run, same in zip(runs, equal, strict=True)]
        same = self._same if all(equal) else {}
        self.program: ViewProgram = context.program(mixes, True, self._constant, same)
        self.cut = joining(context, phase, [run.silo for run in runs], self._alone)


def _train_phase(work: _PhaseWork, optimizer: PhaseOptimizer) -> None:
    # silos with fewer batches end earlier; steps are counted per phase, for the random draws
    for step, of_all in enumerate(zip_longest(*work.batches)):
        pairs = [(index, batch) for index, batch in enumerate(of_all) if batch is not None]
        active, batches = [index for index, _ in pairs], [batch for _, batch in pairs]
        runs = [work.members[index] for index in active]
        work.prepare(step, active)
        micro_batches = work.cut(batches)
        optimizer.zero_grad()
        steps = [
            run.step(batch, (work.number, work.phase.name, step), partial(optimizer.scaled, index))
            for run, (index, batch) in zip(runs, pairs, strict=True)
        ]
        gradients = work.gradients.add(work.program, steps, micro_batches)
        scalars = [*gradients, *(optimizer.skips(index) for index in active)]
        flat = torch.stack([term.reshape(()) for logged in scalars for term in logged.values()])  # types are promoted
        numbers = iter(flat.tolist())  # one transfer a step
        values = [{name: next(numbers) for name in logged} for logged in scalars]
        terms, skips = values[: len(pairs)], values[len(pairs) :]
        for run, logged in zip(runs, terms, strict=True):
            if not math.isfinite(logged["loss"]):
                reason = f"training diverged, the loss is {logged['loss']} (train.lr is {work.lr:g})"
                if not work.quiet:
                    raise Diverged(f"silo {run.silo.name!r}, round {work.number}, phase {work.phase.name!r}: {reason}")
                run.note = f"phase {work.phase.name!r}: {reason}"
        for run in runs:
            run.rest(work.phase, step)
        optimizer.step({index: step - int(skip.get("skipped", 0)) for index, skip in zip(active, skips, strict=True)})
        for member, (run, batch, logged) in enumerate(zip(runs, batches, terms, strict=True)):
            if (step + 1) % work.phase.steps_per_batch == 0:
                run.follow(work.phase)
            run.count(batch, logged, micro_batches, member)


def _train_with_noise(steps: NoisedSteps, run: LocalRound, optimizer: PhaseOptimizer, index: int) -> None:
    """Train a silo in a phase under DP-SGD, in which a loss that is not finite does not end the run."""
    phase = steps.phase
    for step in range(steps.count):
        state, memory, _ = run.seen_by(phase)
        result = steps.step(step, state, run.received, memory)
        optimizer.zero_grad()
        for name, gradient in result.gradient.items():
            part, tensor = name.split("/", 1)
            run.state[part][tensor].grad = gradient
        run.rest(phase, step)
        optimizer.step({index: step})
        if (step + 1) % phase.steps_per_batch == 0:
            run.follow(phase)
        run.noised_sums = result.noised_sums or run.noised_sums
        run.steps, run.rows = run.steps + 1, run.rows + result.rows
        run.log({term: float(value) for term, value in result.terms.items()})
