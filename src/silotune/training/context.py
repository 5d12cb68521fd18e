"""Objects that all local rounds of a run share: backbone, method, parts, phases and view programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from silotune.config import TrainConfig
from silotune.core import tensors as part_tools
from silotune.core.tensors import State, Tensors
from silotune.data.batching import batch_count
from silotune.methods.base import Method
from silotune.methods.parts import Part, Scope, names_with
from silotune.methods.phase import Phase
from silotune.methods.step import REFERENCE, previous_tensors
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.activation_cache import ActivationCache
from silotune.models.forward.mixing import Mix, MixEntry, can_share_forward, constant_views, parts_in, trained_parts
from silotune.models.forward.untouched_vectors import UntouchedVectors
from silotune.models.forward.view_program import ViewProgram
from silotune.models.heads import Head, LossRecipe
from silotune.models.heads.base import head_readings
from silotune.models.tuners import tuner_of
from silotune.training.initial_parts import InitialParts, TrainedParts
from silotune.training.prediction import PredictionContext
from silotune.training.row_privacy import RowPrivacy, units_of
from silotune.training.silo import Silo, SiloState


class TrainingContext(PredictionContext):
    """The objects that all local rounds of a run share; it holds no state of any silo.

    Arguments that are not listed are those of `PredictionContext`.

    Args:
        method: declares parts, phases and prediction.
        train: optimizer, steps and batch size.
        seed: the run's seed, from which all draws are derived.
        start: initial tensors of every adapter, or the parts of a finished run; None: all are drawn.
        tokens_at_once: the most tokens of a step's graph; None: `train.tokens_at_once`, where it is a number.
        rounds: rounds of the run, which a schedule of the learning rate may span.
        measures: whether silos measure the loss of what they receive (`RECEIVED_LOSS`) before they train.
    """

    def __init__(
        self,
        backbone: Backbone,
        method: Method,
        train: TrainConfig,
        seed: int,
        start: Tensors | TrainedParts | None = None,
        cache: ActivationCache | None = None,
        tokens_at_once: int | None = None,
        rows_scored: int = 64,
        rows_written: int = 32,
        rounds: int = 1,
        measures: bool = False,
    ) -> None:
        self.method = method
        super().__init__(
            backbone,
            method.parts(),
            method.prediction(),
            method.setting.head,
            method=method.name,
            max_length=train.max_length,
            rows_scored=rows_scored,
            rows_written=rows_written,
            cache=cache,
        )
        self.untouched = UntouchedVectors(backbone)
        self.phases = [self._with_reference(phase) for phase in method.local_phases()]
        self.server_phases = [self._with_reference(phase) for phase in method.server_phases()]
        self.train = train
        self.seed = seed
        self.initial = InitialParts(backbone, method, self.parts, seed, start)
        self.rounds = rounds
        self.measures = measures
        self.recipe = LossRecipe(train.label_smoothing, train.class_weights)
        own = train.tokens_at_once
        self.tokens_at_once = own if tokens_at_once is None and isinstance(own, int) else tokens_at_once
        self.draw_seed = seed
        """Seed of silos' draws about their own rows, such as their order; a silo may keep its own secret."""
        self.row_privacy: RowPrivacy | None = None
        """DP-SGD in the silos (`privacy.unit`); None: no noise on rows."""
        self._round_parts: tuple[int, dict[str, Part]] | None = None

    def _with_reference(self, phase: Phase) -> Phase:
        """Add the view of the backbone alone, if a head reads it."""
        reads = any(head.reads_reference for head in self.heads)
        return replace(phase, views={**phase.views, REFERENCE: {}}) if reads else phase

    # -- states ------------------------------------------------------------------------------------------------------

    def state_of(self, silo: Silo) -> SiloState:
        """Return the silo's state; before its first participation, the one derived from the seed."""
        if silo.state is not None:
            return silo.state
        return SiloState(self.initial.private(silo.name, [rows.task for rows in silo.train.values()]))

    @cached_property
    def fixed(self) -> State:
        """The fixed parts, on the CPU; they must not be changed. See `InitialParts.fixed`."""
        return self.initial.fixed()

    def model_state(self, silo: Silo, shared: State) -> State:
        """Return all parts of a silo's model, on the CPU: shared parts as given, its private ones, fixed ones."""
        return shared | self.state_of(silo).private | self.initial.at_rank(self.fixed, silo.name)

    @cached_property
    def constant_parts(self) -> frozenset[str]:
        """The shared parts that no phase changes: silos that train together have them in common."""
        return frozenset(names_with(self.parts, Scope.SHARED)) - self.method.changes()

    def kinds_of_rounds(self) -> list[list[Phase]]:
        """Return the distinct choices of phases that the run's rounds have, the first round's first."""
        numbers = self.method.kinds_of_rounds(self.rounds)
        return [[phase for phase in self.phases if phase.runs_in(number)] for number in numbers]

    def sent(self, number: int) -> dict[str, Part]:
        """Return the parts that leave a silo in a round; see `Method.sends`."""
        if self._round_parts is None or self._round_parts[0] != number:  # asked for by every silo of a round
            self._round_parts = number, {name: self.parts[name] for name in self.method.sends(number)}
        return self._round_parts[1]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def replicas(self, phase: Phase) -> int:
        """Return how many of a phase's trained views share a forward.

        One backbone call over k replicated batches has one call overhead.
        """
        trained = [mix for mix in phase.views.values() if trained_parts(mix, phase.trains)]
        tuners = {tuner_of(self.parts[part].module) for mix in trained for part in parts_in(mix)}
        shared = all(tuner is not None and can_share_forward(self.backbone, tuner) for tuner in tuners)
        return max(1, len(trained)) if shared else 1

    @property
    def heads(self) -> list[Head]:
        """The heads among the method's parts."""
        return [part.module for part in self.parts.values() if isinstance(part.module, Head)]

    @property
    def draws(self) -> bool:
        """Whether any tuner draws random numbers in training."""
        return any(tuner.draws for tuner in self.tuners)

    @property
    def views_draw(self) -> bool:
        """Whether views with gradient draw random numbers: dropout of a tuner or of the backbone."""
        rate = self.train.dropout
        return self.draws or bool(any(tuner.trains_backbone for tuner in self.tuners) if rate is None else rate)

    def rate_factor(self, name: str) -> float:
        """Return the factor of the learning rate of a "part/tensor"; see `Tuner.rate_factor`."""
        part, tensor = name.split("/", 1)
        tuner = tuner_of(self.parts[part].module)
        return 1.0 if tuner is None else tuner.rate_factor(tensor)

    # -- views -------------------------------------------------------------------------------------------------------

    def epochs(self, phase: Phase) -> int | None:
        """Return the number of passes over the rows, or None if `train.steps` counts instead."""
        if phase.epochs is None and self.train.steps is not None:
            return None
        return phase.epochs or self.train.epochs

    def steps(self, silo: Silo, phase: Phase) -> int:
        """Return the number of optimizer steps that a silo takes in a phase."""
        return phase.steps_per_batch * self.batches(silo, phase)

    def batches(self, silo: Silo, phase: Phase) -> int:
        """Return the number of batches that a silo draws in a phase."""
        epochs = self.epochs(phase)
        if epochs is None:
            return self.train.steps or 0
        if self.row_privacy is not None and self.row_privacy.covers(phase):
            return epochs * math.ceil(1 / self.rate_of_units(silo))
        return epochs * sum(batch_count(rows.examples, self.train.batch_size) for rows in silo.train.values())

    def rate_of_units(self, silo: Silo) -> float:
        """Return the probability with which a step under noise on rows draws a unit."""
        rate = None if self.row_privacy is None else self.row_privacy.rate
        return min(1.0, self.train.batch_size / len(units_of(silo))) if rate is None else rate

    def constant_views(self, phase: Phase) -> frozenset[str]:
        """Return the names of the views that stay constant in a phase, to be computed once.

        They are none if rows pass once, or if a tuner draws random numbers.
        """
        if self.epochs(phase) == phase.steps_per_batch == 1 or self.draws:
            return frozenset()
        return constant_views(phase.views, phase.changes)

    def program(
        self,
        mixes: Sequence[Mapping[str, Sequence[MixEntry]]],
        training: bool = False,
        constant: frozenset[str] = frozenset(),
        same: Mapping[str, str] = {},
    ) -> ViewProgram:
        """Compile the views of each silo's mixes, with the readings of the method's heads.

        Views for the loss of training have `train.dropout` and `train.label_smoothing`; constant ones may be kept for
        later batches; `same` is `Phase.same_at_start`.
        """
        smoothing = self.recipe.label_smoothing if training else 0.0
        return ViewProgram(
            self.backbone,
            mixes,
            readings=partial(head_readings, self.heads, self.backbone, smoothing),
            dropout=self.train.dropout if training else None,
            constant=constant,
            same=same,
            activation_cache=self.cache,
            guard=self.guard,
            untouched=self.untouched,
        )

    def resolve(self, mix: Mix, state: State, received: State, memory: Tensors) -> list[MixEntry]:
        """Look up the tensors of a mix's names.

        A silo's first participation has no previous parts; the received ones take their place.
        """
        return self._entries(mix, state, partial(self._anchored, state, received, memory))

    def _anchored(self, state: State, received: State, memory: Tensors, anchor: str, part: str) -> Tensors:
        if anchor == "" or self.parts[part].scope is Scope.FIXED:
            return state[part]
        if anchor == "frozen":
            return part_tools.detached(state[part])
        return (previous_tensors(memory, part) if anchor == "previous" else {}) or received[part]
