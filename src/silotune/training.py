"""One local round: a silo's rows and parts in, updated parts and numbers out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from silotune import parts as part_tools
from silotune.backbone import Backbone
from silotune.data.batching import CALL_COST, Batch, epoch
from silotune.errors import Diverged
from silotune.heads import Head
from silotune.methods.base import PREVIOUS, Method, Phase, Step, previous_tensors
from silotune.methods.check import check_method
from silotune.mixing import stacks
from silotune.parts import Part, Scope, State, Tensors
from silotune.randomness import generator, seeded
from silotune.silo import Silo, SiloState
from silotune.tuners.base import Tuner
from silotune.views import Ingredient, Mix, View, run_views, settled

if TYPE_CHECKING:
    from silotune.config import TrainConfig
    from silotune.frozen_prefix import FrozenPrefix


@dataclass
class LocalResult:
    """A finished local round: all parts, what to keep, and numbers and a remark for the log."""

    state: State
    memory: Tensors
    metrics: dict[str, float]
    note: str = ""


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
        cache: FrozenPrefix | None = None,
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

        A fresh optimiser per phase and round; the silo's own object is not changed.
        """
        phases = [phase for phase in self.phases if phase.when == "round"]
        return self._train(silo, self.state_of(silo), shared, number, phases)

    def final(self, silo: Silo, shared: State, number: int) -> LocalResult:
        """The final phases that concern this silo, after the last round; its own object is not changed.

        Phases for sampled silos pass over one that never took part.
        """
        phases = [phase for phase in self.phases if phase.when == "end" and (phase.who == "all" or silo.state)]
        return self._train(silo, self.state_of(silo), shared, number, phases)

    def adapt(self, silo: Silo, shared: State, number: int, anew: bool) -> State:
        """A silo's private parts after the phases that train these alone: how one joins when the rounds are over.

        `anew`: from where such a phase begins in every silo; else from the parts that the silo has.
        """
        private = [name for name, part in self.parts.items() if part.scope is Scope.PRIVATE]
        phases = [
            replace(phase, start=phase.start if anew else {}) for phase in self.phases if {*phase.trains} <= {*private}
        ]
        state = self._train(silo, self.state_of(silo), shared, number, phases).state
        return {name: state[name] for name in private}

    def server_step(self, server: Silo, shared: State, number: int) -> LocalResult:
        """The method's server phases, from the aggregated shared parts, on the coordinator's labelled rows."""
        return self._train(server, SiloState({}), shared, number, self.server_phases)

    def _train(self, silo: Silo, own: SiloState, shared: State, number: int, phases: Sequence[Phase]) -> LocalResult:
        started = time.perf_counter()
        device = self.backbone.device
        state: State = {
            name: _to((shared if part.scope is Scope.SHARED else own.private).get(name, {}), device)
            for name, part in self.parts.items()  # a part without tensors leaves no trace in messages and files
        }
        received = {name: _to(shared[name], device) for name in shared}
        memory = _to(own.memory, device)
        sums: dict[str, float] = {}
        first = not any(key.startswith(f"{PREVIOUS}/") for key in memory)
        note = ""
        steps = rows = real = padded = 0
        for phase in phases:
            if phase.skips_first and first:
                note = f"first participation: no {phase.name!r} phase, received parts are kept"
                continue
            for target, source in phase.start.items():
                state[target] = part_tools.copy(state[source])
            for name in phase.trains:
                state[name] = {key: tensor.clone().requires_grad_() for key, tensor in state[name].items()}
            leaves = [tensor for name in phase.trains for tensor in state[name].values()]
            if not leaves:  # a phase for a head that has nothing to train
                continue
            optimiser = make_optimiser(self.train, leaves)
            for taken, batch in enumerate(self._batches(silo, phase, number)):  # other phases leave no trace in draws
                with seeded(self.seed, "dropout", silo.name, number, phase.name, taken):
                    step = self._step(silo, phase, batch, state, received, memory, number, taken)
                    loss = phase.loss(step)
                found = float(loss.detach())
                if not math.isfinite(found):
                    raise Diverged(
                        f"silo {silo.name!r}, round {number}, phase {phase.name!r}: training diverged, the loss is "
                        f"{found} (train.lr is {self.train.lr:g})"
                    )
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                steps, rows = steps + 1, rows + len(batch)
                real += sum(int(inputs["attention_mask"].sum()) for inputs in batch.micro)
                padded += sum(inputs["attention_mask"].numel() for inputs in batch.micro)
                for term, value in {"loss": found, **{name: float(term) for name, term in step.terms.items()}}.items():
                    sums[term] = sums.get(term, 0.0) + value
            state = {name: part_tools.copy(tensors) for name, tensors in state.items()}
        metrics = {term: value / max(steps, 1) for term, value in sums.items()}
        metrics |= {"steps": steps, "rows": rows, "real_tokens": real, "padded_tokens": padded}
        metrics["seconds"] = time.perf_counter() - started
        remembered = {
            f"{PREVIOUS}/{name}/{key}": tensor
            for name in self.method.remembers
            for key, tensor in part_tools.copy(state[name]).items()
        }
        state = {name: _to(tensors, torch.device("cpu")) for name, tensors in state.items()}
        return LocalResult(state, _to(memory | remembered, torch.device("cpu")), metrics, note)

    def _batches(self, silo: Silo, phase: Phase, number: int) -> Iterator[Batch]:
        train = self.train
        pad = int(self.backbone.tokenizer.pad_token_id or 0)
        cost = CALL_COST // self._copies(phase)

        def passes() -> Iterator[Batch]:
            count = 0
            while True:
                purpose = (silo.name, number, phase.name, count)
                yield from epoch(silo.train, train.batch_size, pad, self.seed, *purpose, call_cost=cost)
                count += 1

        if phase.epochs is None and train.steps is not None:
            return islice(passes(), train.steps)
        per_epoch = sum(-(-len(rows) // train.batch_size) for rows in silo.train.values())
        return islice(passes(), per_epoch * (phase.epochs or train.epochs))

    def _copies(self, phase: Phase) -> int:
        """How many of a phase's trained views share a forward: a call over that many copies of the rows costs once."""
        trained = [mix for mix in phase.views.values() if {*mix} & {*phase.trains}]
        tuners = [self.parts[name].module for mix in trained for name in mix if name in self.parts]
        shared = all(isinstance(one, Tuner) and stacks(self.backbone, one) for one in tuners)
        return max(1, len(trained)) if shared else 1

    def _step(
        self,
        silo: Silo,
        phase: Phase,
        batch: Batch,
        state: State,
        received: State,
        memory: Tensors,
        number: int,
        steps: int,
    ) -> Step:
        views = self.views(
            batch, {name: self.resolve(mix, state, received, memory) for name, mix in phase.views.items()}
        )
        draws = generator(self.seed, "step", silo.name, number, phase.name, steps)
        return Step(batch, views, state, received, memory, draws, self.parts)

    def view(self, batch: Batch, mix: Sequence[Ingredient]) -> View:
        """One view of a batch; see `views`."""
        return self.views(batch, {"": mix})[""]

    def views(self, batch: Batch, mixes: Mapping[str, Sequence[Ingredient]]) -> dict[str, View]:
        """The batch under several mixes, with what the method's heads read of each."""
        heads = [part.module for part in self.parts.values() if isinstance(part.module, Head)]
        readings = {head: head.reading(self.backbone, batch.task) for head in heads}
        own = {head.name: reading for head, reading in readings.items() if reading is not None}
        return run_views(self.backbone, batch, mixes, head_readings=own, cache=self.cache)

    def resolve(self, mix: Mix, state: State, received: State, memory: Tensors) -> list[Ingredient]:
        """A mix's names as tensors. A silo's first participation has no previous parts: then the received ones."""
        ingredients = []
        for name, weight in settled(mix, state).items():
            anchor, _, part = name.rpartition(":")
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
            ingredients.append(Ingredient(module, tensors, weight))
        return ingredients

    @torch.no_grad()
    def logits(self, state: State, batch: Batch, alpha: Tensor | None = None) -> Tensor:
        """The personalised model's logits, shape (rows, classes), in the batch's order.

        `alpha`, shape (rows,), is each text's weight, where the method finds them anew for each text.
        """
        prediction = self.method.prediction()
        view = self.view(batch, self.resolve(prediction.mixed(alpha), state, {}, {}))
        step = Step(batch, {"prediction": view}, state, {}, {}, torch.Generator(), self.parts)
        return step.logits("prediction", prediction.head)


def make_optimiser(train: TrainConfig, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """A fresh optimiser with constant learning rate."""
    if train.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=train.lr)
    if train.optimizer == "adafactor":
        return torch.optim.Adafactor(tensors, lr=train.lr)
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    fused = all(tensor.dtype is torch.float32 for tensor in tensors)
    return kind(tensors, lr=train.lr, fused=fused)


def _to(tensors: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """On the device and in name order: a loss that sums over a part's tensors gives the same bits after a resume."""
    return {name: tensor.detach().to(device) for name, tensor in sorted(tensors.items())}
