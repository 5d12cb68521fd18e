"""What all local rounds of a run share: backbone, method, how batches are drawn and views are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.optimization import Adafactor

from silotune.core import tensors as part_tools
from silotune.core.randomness import Stream, generator
from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch, call_cost_on, epoch
from silotune.data.cohort_batches import CohortMicroBatch, cut_jointly, own_micro_batches, zip_micro_batches
from silotune.methods.base import Method, Phase, Step, previous_tensors
from silotune.methods.parts import Part, Scope
from silotune.methods.validation import check_method
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import Mix, MixEntry, can_share_forward, parsed, resolve_weights
from silotune.models.forward.view_cache import ConstantViewCache, constant_views
from silotune.models.forward.views import View, ViewRequest, run_views
from silotune.models.heads import Head
from silotune.models.tuners.base import Tuner
from silotune.training.local_round import LocalResult as LocalResult
from silotune.training.local_round import train
from silotune.training.silo import Silo, SiloState

if TYPE_CHECKING:
    from silotune.config import TrainConfig
    from silotune.models.forward.activation_cache import ActivationCache


class LocalTraining:
    """Runs silos' local rounds over the one backbone. Holds nothing of any silo.

    `start`, where it is given, is what every adapter begins as, instead of a draw. `cache` keeps what lies below the
    adapters.
    """

    def __init__(
        self,
        backbone: Backbone,
        method: Method,
        train: TrainConfig,
        seed: int,
        start: Tensors | None = None,
        cache: ActivationCache | None = None,
    ) -> None:
        self.backbone = backbone
        self.method = method
        self.parts: dict[str, Part] = method.parts()
        self.phases = method.phases()
        self.server_phases = method.server_phases()
        check_method(method)
        self.train = train
        self.seed = seed
        self.start = start
        self.cache = cache

    def initial_shared(self, silos: Iterable[Silo]) -> State:
        """The shared parts before round 1, equal for all."""
        tasks = {rows.task.name: rows.task for silo in silos for rows in silo.train.values()}
        return {
            name: self._init(name, part, tasks.values())
            for name, part in self.parts.items()
            if part.scope is Scope.SHARED
        }

    def state_of(self, silo: Silo) -> SiloState:
        """The silo's state; before its first participation, derived from the seed."""
        if silo.state is not None:
            return silo.state
        tasks = [rows.task for rows in silo.train.values()]
        private = {
            name: self._init(name, part, tasks, silo.name)
            for name, part in self.parts.items()
            if part.scope is Scope.PRIVATE
        }
        return SiloState(private)

    def _init(self, name: str, part: Part, tasks: Iterable[object], silo: str = "") -> Tensors:
        if self.start is not None and isinstance(part.module, Tuner):
            return part_tools.copy(self.start)
        if part.start is not None:  # draw as that part does; a shared one is the same on all silos
            name, silo = part.start, "" if self.parts[part.start].scope is Scope.SHARED else silo
        draws = generator(self.seed, "init", name, silo)
        return part.module.init(self.backbone, tasks, draws)  # type: ignore[arg-type]

    def round(self, silo: Silo, shared: State, number: int) -> LocalResult:
        """One local round: the method's phases in order, from the received shared parts.

        A fresh optimizer per phase and round; the silo's own object is not changed.
        """
        return self.rounds([silo], shared, number)[0]

    def rounds(self, silos: Sequence[Silo], shared: State, number: int) -> list[LocalResult]:
        """As `round`, for several silos at once (`silotune.local_round`); results in their order."""
        return train(self, silos, shared, number, [phase for phase in self.phases if phase.when == "round"])

    def final(self, silo: Silo, shared: State, number: int) -> LocalResult:
        """The final phases that concern this silo, after the last round; its own object is not changed.

        Phases for sampled silos pass over one that never took part.
        """
        return self.finals([silo], shared, number)[0]

    def finals(self, silos: Sequence[Silo], shared: State, number: int) -> list[LocalResult]:
        """As `final`, for several silos at once; results in their order."""
        found: dict[str, LocalResult] = {}
        for sampled in (True, False):
            some = [silo for silo in silos if (silo.state is not None) is sampled]
            phases = [phase for phase in self.phases if phase.when == "end" and (phase.who == "all" or sampled)]
            if some:
                results = train(self, some, shared, number, phases)
                found |= {silo.name: result for silo, result in zip(some, results, strict=True)}
        return [found[silo.name] for silo in silos]

    def adapt(self, silo: Silo, shared: State, number: int, anew: bool) -> State:
        """A silo's private parts after the phases that train these alone: how one joins when the rounds are over.

        `anew`: from where such a phase begins in every silo; else from the parts that the silo has.
        """
        private = [name for name, part in self.parts.items() if part.scope is Scope.PRIVATE]
        phases = [
            replace(phase, start=phase.start if anew else {}) for phase in self.phases if {*phase.trains} <= {*private}
        ]
        state = train(self, [silo], shared, number, phases)[0].state
        return {name: state[name] for name in private}

    def server_step(self, server: Silo, shared: State, number: int) -> LocalResult:
        """The method's server phases, from the aggregated shared parts, on the coordinator's labeled rows."""
        return train(self, [replace(server, state=SiloState({}))], shared, number, self.server_phases)[0]

    def batches(self, silo: Silo, phase: Phase, number: int, own_micro_batches: bool = True) -> Iterator[Batch]:
        """A phase's batches, in the order derived for this silo and round.

        `alone`: cut into micro-batches of their own; else they are cut together with others' (`joints`), unless a
        tuner draws for every row what it would draw for it alone.
        """
        train = self.train
        cost = self._call_cost(phase) if own_micro_batches or self.draws else None

        def passes() -> Iterator[Batch]:
            count = 0
            while True:
                purpose = (silo.name, number, phase.name, count)
                yield from epoch(
                    silo.train, train.batch_size, self.backbone.pad_id, self.seed, *purpose, call_cost=cost
                )
                count += 1

        epochs = self._epochs(phase)
        if epochs is None:
            return islice(passes(), train.steps)
        per_epoch = sum(-(-len(rows) // train.batch_size) for rows in silo.train.values())
        return islice(passes(), per_epoch * epochs)

    def _epochs(self, phase: Phase) -> int | None:
        """Passes over the rows; None where `train.steps` counts instead."""
        if phase.epochs is None and self.train.steps is not None:
            return None
        return phase.epochs or self.train.epochs

    def joints(self, batches: Sequence[Batch], phase: Phase) -> list[CohortMicroBatch]:
        """How the rows of these batches go through the backbone together."""
        if batches[0].micro:
            return zip_micro_batches(batches, self.backbone.pad_id)
        return cut_jointly(batches, self.backbone.pad_id, self._call_cost(phase))

    @property
    def draws(self) -> bool:
        """Whether any tuner draws random numbers in training."""
        return any(tuner.draws for tuner in self.tuners)

    @property
    def tuners(self) -> list[Tuner]:
        """The tuners of the method's parts, each once."""
        found = {id(part.module): part.module for part in self.parts.values() if isinstance(part.module, Tuner)}
        return list(found.values())

    def _call_cost(self, phase: Phase) -> int:
        """A call's cost in tokens of one copy of the rows, where a phase's views share calls."""
        return call_cost_on(self.backbone.device) // self.copies(phase)

    def copies(self, phase: Phase) -> int:
        """How many of a phase's trained views share a forward: a call over that many copies of the rows costs once."""
        trained = [mix for mix in phase.views.values() if {*mix} & {*phase.trains}]
        tuners = [self.parts[name].module for mix in trained for name in mix if name in self.parts]
        shared = all(isinstance(one, Tuner) and can_share_forward(self.backbone, one) for one in tuners)
        return max(1, len(trained)) if shared else 1

    def known_readings(self, phase: Phase) -> ConstantViewCache:
        """Where a phase's constant views are kept; none are where rows pass once, or where passes differ in draws."""
        if self._epochs(phase) == 1 or self.draws:
            return ConstantViewCache()
        return ConstantViewCache(constant_views(phase.views, phase.trains))

    def make_optimizer(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        """A fresh optimizer of these tensors."""
        return make_optimizer(self.train, tensors)

    def view(self, batch: Batch, mix: Sequence[MixEntry]) -> View:
        """One view of a batch; see `views`."""
        return self.views(batch, {"": mix})[""]

    def views(self, batch: Batch, mixes: Mapping[str, Sequence[MixEntry]]) -> dict[str, View]:
        """The batch under several mixes, with what the method's heads read of each."""
        return self.views_together([batch], own_micro_batches(batch), [mixes])[0]

    def views_together(
        self,
        batches: Sequence[Batch],
        joints: Sequence[CohortMicroBatch],
        mixes: Sequence[Mapping[str, Sequence[MixEntry]]],
        streams: Sequence[Stream] = (),
        known: Sequence[ConstantViewCache] = (),
    ) -> list[dict[str, View]]:
        """As `views`, for batches of several silos in the same forwards; see `run_views`."""
        heads = [part.module for part in self.parts.values() if isinstance(part.module, Head)]
        own = []
        for batch in batches:
            readings = {head.name: head.reading(self.backbone, batch.task) for head in heads}
            own.append({name: reading for name, reading in readings.items() if reading is not None})
        request = ViewRequest(
            batches,
            mixes,
            joints,
            head_readings=own,
            activation_cache=self.cache,
            streams=streams,
            view_caches=known,
        )
        return run_views(self.backbone, request)

    def resolve(self, mix: Mix, state: State, received: State, memory: Tensors) -> list[MixEntry]:
        """A mix's names as tensors. A silo's first participation has no previous parts: then the received ones."""
        ingredients = []
        for name, weight in resolve_weights(mix, state).items():
            anchor, part = parsed(name)
            if anchor == "received":
                tensors = received[part]
            elif anchor == "previous":
                tensors = previous_tensors(memory, part) or received[part]
            elif anchor == "frozen":
                tensors = {key: tensor.detach() for key, tensor in state[part].items()}
            else:
                tensors = state[part]
            module = self.parts[part].module
            assert isinstance(module, Tuner), f"part {part!r} is in a mix but is no tuner"
            ingredients.append(MixEntry(module, tensors, weight))
        return ingredients

    @torch.no_grad()
    def logits(self, state: State, batch: Batch, alpha: Tensor | None = None) -> Tensor:
        """The personalized model's logits, shape (rows, classes), in the batch's order.

        `alpha`, shape (rows,), is each text's weight, where the method finds them anew for each text.
        """
        prediction = self.method.prediction()
        view = self.view(batch, self.resolve(prediction.mixed(alpha), state, {}, {}))
        step = Step(batch, {"prediction": view}, state, {}, {}, self.parts)
        return step.logits("prediction", prediction.head)


def make_optimizer(train: TrainConfig, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """A fresh optimizer with constant learning rate.

    Adafactor too (Shazeer and Stern 2018, algorithm 4 without relative steps and parameter scaling), as prompt tuning
    on T5 has it (Lester et al. 2021): torch's own can be neither.
    """
    if train.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=train.lr)
    if train.optimizer == "adafactor":
        return Adafactor(tensors, lr=train.lr, relative_step=False, scale_parameter=False)  # type: ignore[no-untyped-call]
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    fused = all(tensor.dtype is torch.float32 for tensor in tensors)
    return kind(tensors, lr=train.lr, fused=fused)
