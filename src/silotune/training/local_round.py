"""Run a local round of one silo or of a cohort: phases, optimizer steps, the new state and metrics.

A silo does the same either way: it has its own batches in its own order, its own loss over its own views, and its own
gradients, because its parts are leaves of their own. In a cohort its result is the one it would have alone, up to
rounding, because matrix products have other shapes. A silo with fewer steps leaves the cohort when it is done.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from silotune.aggregation import RECEIVED_LOSS
from silotune.communication.privacy.noise import NoiseStream
from silotune.config import TrainConfig
from silotune.core import tensors as part_tools
from silotune.core.randomness import Stream
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch, MicroBatch
from silotune.errors import Diverged, InputError
from silotune.methods.phase import Phase
from silotune.methods.step import PREVIOUS, LocalTraining, Named, Step, local_training
from silotune.models.forward.mixing import MixEntry
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import ConstantViews
from silotune.training.context import TrainingContext
from silotune.training.phase_batches import joining, phase_batches
from silotune.training.phase_optimizer import PhaseOptimizer, Schedule
from silotune.training.private_steps import PrivateSteps
from silotune.training.row_privacy import RowPrivacy, each_alone
from silotune.training.silo import Silo
from silotune.training.step_gradients import SiloStep, StepGradients


@dataclass
class LocalResult:
    """A finished local round: all parts, the memory to keep, and metrics and a note for the log."""

    state: State
    memory: Tensors
    metrics: dict[str, float]
    note: str = ""
    sums: tuple[int, Tensors] | None = None
    """What the silo adds to the sum of silos in place of a change of its own; see `PrivateGradient.sums`."""


@dataclass
class _LocalRound:
    """A silo's local round in progress."""

    silo: Silo
    state: State
    received: State
    memory: Tensors
    training: LocalTraining
    stream: NoiseStream | None
    """The numbers of the round's draws under noise on rows; None without."""
    privacy: RowPrivacy | None
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sum of each loss term."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of steps that logged the term."""
    kept: ConstantViews = field(default_factory=ConstantViews)
    """The present phase's constant views."""
    anchors: State = field(default_factory=dict)
    """The received parts as losses and views read them; in a first step they may be the silo's own."""
    changed: set[str] = field(default_factory=set)
    """Parts that are no longer as the round began with them."""
    starts_as_received: bool = False
    """Whether the present phase began with the round's own parts."""
    note: str = ""
    summed: tuple[int, Tensors] | None = None
    steps: int = 0
    skipped: int | None = None
    rows: int = 0
    real: int = 0
    padded: int = 0

    def enters(self, phase: Phase, number: int, draws: bool) -> bool:
        """Return whether the silo runs a phase, which may depend on earlier rounds, and on dropout of the views."""
        if phase.also_first and phase.when == "round" and self.silo.state is not None and not phase.runs_in(number):
            return False
        first = not any(key.startswith(f"{PREVIOUS}/") for key in self.memory)
        if phase.skips_first and first and not draws:
            self.note = f"first participation: no {phase.name!r} phase, received parts are kept"
            return False
        return True

    def seen_by(self, phase: Phase) -> tuple[State, Tensors, LocalTraining]:
        """Return parts, memory and local training as a phase's functions may read them; see `RowPrivacy.seen_by`."""
        everything = self.state, self.memory, self.training
        return everything if self.privacy is None else self.privacy.seen_by(phase, *everything)

    def begin(self, phase: Phase) -> Tensors:
        """Set the phase's parts to their starting tensors, as leaves of the graph; return those leaves by name."""
        for target, source in phase.start.items():
            state, _, training = self.seen_by(phase)
            with local_training(training):
                made = state[source] if isinstance(source, str) else source(state, self.received)
            if target in self.received:
                _require_alike(f"phase {phase.name!r} sets part {target!r} to", made, self.received[target])
            self.state[target] = part_tools.copy(made)
        changed = {*phase.changes}
        self.starts_as_received = not changed & self.changed and not phase.start
        self.changed |= changed
        for name in phase.trains:
            self.state[name] = {key: tensor.clone().requires_grad_() for key, tensor in self.state[name].items()}
        return part_tools.flatten({name: self.state[name] for name in phase.trains})

    def mixes(self, context: TrainingContext, phase: Phase, same: bool) -> dict[str, list[MixEntry]]:
        """Look up the mixes of a phase's views."""
        self.anchors = self.received
        if same:  # what a loss computes from them is then the same, too
            self.anchors = {name: part_tools.detached(self.state[name]) for name in self.received}
        return {name: context.resolve(mix, self.state, self.anchors, self.memory) for name, mix in phase.views.items()}

    def step(self, batch: Batch, drawn_for: tuple[str | int, ...], scaled: Callable[[Tensor], Tensor]) -> SiloStep:
        """Bundle what one silo brings to an optimizer step."""
        weighted = scaled if batch.weight == 1 else lambda loss: scaled(loss * batch.weight)
        purpose = ("dropout", self.silo.name, *drawn_for)
        return SiloStep(batch, self.state, self.anchors, self.memory, self.kept, purpose, weighted, self.training)

    def rest(self, phase: Phase, taken: int) -> None:
        """Remove the gradients of parts that a step leaves as they are (`Phase.turns`); optimizers pass them over.

        With noise on rows these gradients have it already, so that what is left of them says no more of a row.
        """
        for name in phase.resting(taken):
            for tensor in self.state[name].values():
                tensor.grad = None

    @torch.no_grad()
    def follow(self, phase: Phase) -> None:
        """Set the parts of `Phase.then`, all from the state before; trained tensors stay the optimizer's."""
        state, _, training = self.seen_by(phase)
        with local_training(training):
            changed = {name: new(state) for name, new in phase.then.items()}
        for part, tensors in changed.items():
            if part in phase.trains:
                for name, tensor in tensors.items():
                    self.state[part][name].copy_(tensor)
            else:
                self.state[part] = part_tools.copy(tensors)

    @torch.no_grad()
    def gather(self, context: TrainingContext, phase: Phase, number: int) -> None:
        """Compute the parts of `Phase.gathers` in a pass over the silo's rows."""
        for step in self._pass_over_rows(context, phase, number):
            gathered = {part: new(step) for part, new in phase.gathers.items()}
            self.state |= {part: part_tools.copy(tensors) for part, tensors in gathered.items()}

    @torch.no_grad()
    def measure(self, context: TrainingContext, phase: Phase, number: int) -> None:
        """Add the mean of a phase's loss over the silo's rows, as the round begins, to the metrics."""
        once = replace(phase, name=RECEIVED_LOSS, epochs=1, steps_per_batch=1)
        losses = [(len(step.batch), phase.loss(step)) for step in self._pass_over_rows(context, once, number)]
        self.sums[RECEIVED_LOSS] = float(sum(rows * loss for rows, loss in losses))
        self.counts[RECEIVED_LOSS] = sum(rows for rows, _ in losses)

    def _pass_over_rows(self, context: TrainingContext, phase: Phase, number: int) -> Iterator[Step]:
        """Yield the arguments of a phase's loss or functions batch by batch, while the silo is the one at work."""
        for index, batch in enumerate(phase_batches(context, self.silo, phase, number)):
            views = context.program([self.mixes(context, phase, same=False)])(batch)
            step = Step(batch, views, self.state, self.received, self.memory, context.parts, recipe=context.recipe)
            draws = Stream(context.seed, phase.name, self.silo.name, number, index)
            with local_training(self.training), draws:
                yield step

    def end(self, constant: Collection[str], skipped: int | None) -> None:
        """Detach all parts after a phase but constant ones; add its skipped steps, None where no loss is scaled."""
        if skipped is not None:
            self.skipped = (self.skipped or 0) + skipped
        self.state = {
            name: tensors if name in constant else part_tools.copy(tensors) for name, tensors in self.state.items()
        }

    def count(self, batch: Batch, terms: Mapping[str, float], micro_batches: Sequence[MicroBatch], member: int) -> None:
        """Add a step to the metrics."""
        self.steps, self.rows = self.steps + 1, self.rows + len(batch)
        masks = [
            piece.inputs["attention_mask"]
            for micro_batch in micro_batches
            for piece in micro_batch.pieces
            if piece.owner == member
        ]
        self.real += sum(int(mask.sum()) for mask in masks)
        self.padded += sum(mask.numel() for mask in masks)
        self.log(terms)

    def log(self, terms: Mapping[str, float]) -> None:
        """Add a step's terms of the loss to the metrics."""
        for term, value in terms.items():
            self.sums[term] += value
            self.counts[term] += 1

    def result(self, remembers: Sequence[str], seconds: float) -> LocalResult:
        """Return the round's result, on the CPU."""
        metrics = {term: value / self.counts[term] for term, value in self.sums.items()}
        metrics |= {"steps": self.steps, "rows": self.rows}
        metrics |= {} if self.skipped is None else {"skipped_steps": self.skipped}
        metrics |= {"real_tokens": self.real, "padded_tokens": self.padded, "seconds": seconds}
        remembered = {
            f"{PREVIOUS}/{name}/{key}": tensor
            for name in remembers
            for key, tensor in part_tools.copy(self.state[name]).items()
        }
        cpu = torch.device("cpu")
        state = {name: part_tools.on_device(tensors, cpu) for name, tensors in self.state.items()}
        memory = part_tools.on_device(self.memory | remembered, cpu)
        return LocalResult(state, memory, metrics, self.note, self.summed)


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
        kept = context.state_of(silo)
        every_part = shared | kept.private | context.initial.at_rank(context.fixed, silo.name)
        # a part without tensors leaves no trace in messages and files
        own = {name: every_part.get(name, {}) for name in context.parts if name not in constant}
        placed = context.place(own) | in_common
        state = {name: placed[name] for name in context.parts}
        training = _local_training(context, settings, silo, number, phases)
        place = number if any(phase.when == "round" for phase in phases) else context.rounds + 1
        stream = None if privacy is None else privacy.stream(silo, place, shared, kept)
        runs.append(_LocalRound(silo, state, received, context.backbone.place(kept.memory), training, stream, privacy))
    for phase in [phase for phase in phases if phase.trains and phase.when == "round"][: int(context.measures)]:
        for run in runs:
            run.measure(context, phase, number)
    for phase in phases if privacy is None else each_alone(context.method, phases):
        members = [run for run in runs if run.enters(phase, number, context.views_draw)]
        leaves = [run.begin(phase) for run in members]
        for run in members if phase.gathers else ():
            run.gather(context, phase, number)
        # A head without tensors has nothing to train.
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
                    steps = PrivateSteps(context, run.silo, phase, run.stream, run.seen_by(phase)[-1], number)
                    _train_privately(steps, run, optimizer, index)
            else:
                _train_phase(_PhaseWork(context, members, phase, number), optimizer)
            for index, run in enumerate(members if keep else []):
                run.memory = run.memory | optimizer.state(index, phase.name)
            for run, skipped in zip_longest(members, optimizer.skipped()):
                run.end(context.constant_parts, skipped)
    seconds, rows = time.perf_counter() - started, sum(run.rows for run in runs)
    parts = [seconds * run.rows / rows if rows else seconds / len(runs) for run in runs]
    return [run.result(context.method.remembers, part) for run, part in zip(runs, parts, strict=True)]


def _require_alike(what: str, made: object, expected: Tensors) -> None:
    """Refuse what a method's function makes of a part that is sent, where the coordinator would refuse the update."""
    wanted, found = _forms(expected), _forms(made) if isinstance(made, Mapping) else {}
    if found != wanted:
        shown = (f"{name} {form}" for name, form in sorted(wanted.items()) if found.get(name) != form)
        other = [f"{name} {form}" for name, form in sorted(found.items()) if wanted.get(name) != form]
        raise InputError(f"{what} {', '.join(other) or type(made).__name__}; allowed: {', '.join(shown) or 'no more'}")


def _forms(tensors: Mapping[str, object]) -> dict[str, str]:
    """Return name → shape and type, without a number of what may follow from rows."""
    return {
        name: f"{tuple(each.shape)} {each.dtype}" if isinstance(each, Tensor) else type(each).__name__
        for name, each in tensors.items()
    }


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

    def __init__(self, context: TrainingContext, members: Sequence[_LocalRound], phase: Phase, number: int) -> None:
        self._context, self.members, self.phase, self.number = context, members, phase, number
        self._alone = len(members) == 1
        self.batches = [phase_batches(context, run.silo, phase, number, self._alone) for run in members]
        self.gradients = StepGradients(context, phase)
        self.lr = context.train.lr
        self.quiet = context.row_privacy is not None
        """Whether a loss that is not finite ends nothing: an answer that is missing would tell of rows."""
        self._constant = context.constant_views(phase)
        for run in members:
            run.kept = ConstantViews(self._constant)
        # Under dropout equal parts do not make equal views.
        self._same = {} if context.views_draw else phase.same_at_start
        self._renewed = phase.renews_mixes
        self._compiled_for: tuple[object, ...] = ()
        self.prepare(0, range(len(members)))

    def prepare(self, taken: int, active: Sequence[int]) -> None:
        """Compile the views for a step, unless they are as in the last one."""
        wanted = tuple(active), bool(self._same) and taken == 0, taken if self._renewed else 0
        if wanted == self._compiled_for:
            return
        self._compiled_for = wanted
        context, phase, runs = self._context, self.phase, [self.members[index] for index in active]
        equal = [bool(self._same) and taken == 0 and run.starts_as_received for run in runs]
        mixes = [run.mixes(context, phase, same) for run, same in zip(runs, equal, strict=True)]
        same = self._same if all(equal) else {}
        self.program: ViewProgram = context.program(mixes, True, self._constant, same)
        self.cut = joining(context, phase, [run.silo for run in runs], self._alone)


def _train_phase(work: _PhaseWork, optimizer: PhaseOptimizer) -> None:
    # silos with fewer batches end earlier; steps are counted per phase, for the random draws
    for taken, of_all in enumerate(zip_longest(*work.batches)):
        drawn = [(index, batch) for index, batch in enumerate(of_all) if batch is not None]
        active, batches = [index for index, _ in drawn], [batch for _, batch in drawn]
        runs = [work.members[index] for index in active]
        work.prepare(taken, active)
        micro_batches = work.cut(batches)
        optimizer.zero_grad()
        steps = [
            run.step(batch, (work.number, work.phase.name, taken), partial(optimizer.scaled, index))
            for run, (index, batch) in zip(runs, drawn, strict=True)
        ]
        gradients = work.gradients.add(work.program, steps, micro_batches)
        scalars = [*gradients, *(optimizer.skips(index) for index in active)]
        flat = torch.stack([term.reshape(()) for logged in scalars for term in logged.values()])  # types are promoted
        numbers = iter(flat.tolist())  # one transfer a step
        found = [{name: next(numbers) for name in logged} for logged in scalars]
        terms, skips = found[: len(drawn)], found[len(drawn) :]
        for run, logged in zip(runs, terms, strict=True):
            if not math.isfinite(logged["loss"]):
                reason = f"training diverged, the loss is {logged['loss']} (train.lr is {work.lr:g})"
                if not work.quiet:
                    raise Diverged(f"silo {run.silo.name!r}, round {work.number}, phase {work.phase.name!r}: {reason}")
                run.note = f"phase {work.phase.name!r}: {reason}"
        for run in runs:
            run.rest(work.phase, taken)
        optimizer.step({index: taken - int(skip.get("skipped", 0)) for index, skip in zip(active, skips, strict=True)})
        for member, (run, batch, logged) in enumerate(zip(runs, batches, terms, strict=True)):
            if (taken + 1) % work.phase.steps_per_batch == 0:
                run.follow(work.phase)
            run.count(batch, logged, micro_batches, member)


def _train_privately(steps: PrivateSteps, run: _LocalRound, optimizer: PhaseOptimizer, index: int) -> None:
    """Train a silo in a phase under DP-SGD, in which a loss that is not finite does not end the run."""
    phase = steps.phase
    for taken in range(steps.count):
        state, memory, _ = run.seen_by(phase)
        found = steps.step(taken, state, run.received, memory)
        optimizer.zero_grad()
        for name, gradient in found.gradient.items():
            part, tensor = name.split("/", 1)
            run.state[part][tensor].grad = gradient
        run.rest(phase, taken)
        optimizer.step({index: taken})
        if (taken + 1) % phase.steps_per_batch == 0:
            run.follow(phase)
        run.summed = found.sums or run.summed
        run.steps, run.rows = run.steps + 1, run.rows + found.rows
        run.log({term: float(value) for term, value in found.terms.items()})
