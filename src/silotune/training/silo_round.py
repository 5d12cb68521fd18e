"""One silo's local round in progress: its parts from phase to phase, what its steps read, its metrics and result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from silotune.aggregation import RECEIVED_LOSS
from silotune.communication.privacy.noise import NoiseStream
from silotune.core import tensors as part_tools
from silotune.core.randomness import Stream
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch, MicroBatch
from silotune.errors import InputError
from silotune.methods.phase import Phase
from silotune.methods.step import PREVIOUS, LocalTraining, Step, local_training
from silotune.models.forward.mixing import MixEntry
from silotune.models.forward.views import ConstantViews
from silotune.training.context import TrainingContext
from silotune.training.phase_batches import phase_batches
from silotune.training.row_privacy import RowPrivacy
from silotune.training.silo import Silo
from silotune.training.step_gradients import SiloStep


@dataclass
class LocalResult:
    """A finished local round: all parts, the memory to keep, and metrics and a note for the log."""

    state: State
    memory: Tensors
    metrics: dict[str, float]
    note: str = ""
    noised_sums: tuple[int, Tensors] | None = None
    """What the silo adds to the sum of silos in place of a change of its own; see `NoisedGradient.noised_sums`."""


@dataclass
class LocalRound:
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
    constants: ConstantViews = field(default_factory=ConstantViews)
    """The present phase's constant views."""
    anchors: State = field(default_factory=dict)
    """The received parts as losses and views read them; in a first step they may be the silo's own."""
    changed: set[str] = field(default_factory=set)
    """Parts that are no longer as the round began with them."""
    starts_as_received: bool = False
    """Whether the present phase began with the round's own parts."""
    note: str = ""
    noised_sums: tuple[int, Tensors] | None = None
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
                tensors = state[source] if isinstance(source, str) else source(state, self.received)
            if target in self.received:
                _require_alike(f"phase {phase.name!r} sets part {target!r} to", tensors, self.received[target])
            self.state[target] = part_tools.copy(tensors)
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
        return SiloStep(batch, self.state, self.anchors, self.memory, self.constants, purpose, weighted, self.training)

    def rest(self, phase: Phase, step: int) -> None:
        """Remove the gradients of parts that a step leaves as they are (`Phase.turns`); optimizers pass them over.

        With noise on rows these gradients have it already, so that what is left of them says no more of a row.
        """
        for name in phase.resting(step):
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
        return LocalResult(state, memory, metrics, self.note, self.noised_sums)


def _require_alike(what: str, value: object, expected: Tensors) -> None:
    """Refuse what a method's function makes of a part that is sent, where the coordinator would refuse the update."""
    expected_forms, forms = _forms(expected), _forms(value) if isinstance(value, Mapping) else {}
    if forms != expected_forms:
        right = (f"{name} {form}" for name, form in sorted(expected_forms.items()) if forms.get(name) != form)
        other = [f"{name} {form}" for name, form in sorted(forms.items()) if expected_forms.get(name) != form]
        raise InputError(f"{what} {', '.join(other) or type(value).__name__}; allowed: {', '.join(right) or 'no more'}")


def _forms(tensors: Mapping[str, object]) -> dict[str, str]:
    """Return name → shape and type, without a number of what may follow from rows."""
    return {
        name: f"{tuple(each.shape)} {each.dtype}" if isinstance(each, Tensor) else type(each).__name__
        for name, each in tensors.items()
    }
