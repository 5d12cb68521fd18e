"""Choose the phases that train in a silo's round, after the last round, in a new silo, and at the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from silotune.core.tensors import State
from silotune.methods.parts import Scope
from silotune.training.context import TrainingContext
from silotune.training.local_round import train
from silotune.training.silo import Silo, SiloState
from silotune.training.silo_round import LocalResult


class LocalTrainer:
    """Trains silos over one backbone; holds no state of any silo, and leaves the given silos unchanged."""

    def __init__(self, context: TrainingContext) -> None:
        self.context = context

    def rounds(self, silos: Sequence[Silo], shared: State, number: int) -> list[LocalResult]:
        """Run one local round of each silo: the method's phases in order, from the received shared parts.

        Several silos train as a cohort (`silotune.training.local_round`). Each phase of each round has a new optimizer,
        which continues from the last one's state with `train.keep_optimizer`.

        Returns:
            One result per silo, in the order of `silos`.

        Raises:
            Diverged: a loss is not finite.
        """
        phases = [phase for phase in self.context.phases if phase.runs_in(number) or phase.also_first]
        return train(self.context, silos, shared, number, phases)

    def finals(self, silos: Sequence[Silo], shared: State, number: int) -> list[LocalResult]:
        """Run the final phases that concern each silo, after the last round; see `rounds`.

        A silo that was never sampled runs only the phases for all silos.
        """
        results: dict[str, LocalResult] = {}
        for sampled in (True, False):
            group = [silo for silo in silos if (silo.state is not None) is sampled]
            phases = [phase for phase in self.context.phases if phase.when == "end" and (phase.who == "all" or sampled)]
            if group:
                trained = train(self.context, group, shared, number, phases)
                results |= {silo.name: result for silo, result in zip(group, trained, strict=True)}
        return [results[silo.name] for silo in silos]

    def adapt(self, silo: Silo, shared: State, number: int, from_start: bool) -> State:
        """Train a silo that joins after the last round, by the phases that train private parts alone.

        With `from_start` it begins where such a phase begins in every silo, otherwise from its own parts.

        Returns:
            The silo's private parts.
        """
        parts = self.context.parts
        private = [name for name, part in parts.items() if part.scope is Scope.PRIVATE]
        phases = [
            replace(phase, start=phase.start if from_start else {}, when="end")  # once, whatever the rounds
            for phase in self.context.phases
            if {*phase.trains} <= {*private}
        ]
        state = train(self.context, [silo], shared, number, phases)[0].state
        return {name: state[name] for name in private}

    def server_step(self, server: Silo, shared: State, number: int) -> LocalResult:
        """Run the method's server phases on the coordinator's labeled rows, from the aggregated shared parts.

        Their learning rate is `train.server_lr`, if it is given; their optimizer is always new.
        """
        coordinator, settings = replace(server, state=SiloState({})), self.context.train
        if settings.server_lr is not None:
            settings = settings.with_lr(settings.server_lr)
        phases = [phase for phase in self.context.server_phases if phase.runs_in(number)]
        return train(self.context, [coordinator], shared, number, phases, settings)[0]
