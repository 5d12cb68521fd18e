"""Take the coordinator's step of a round in which silos share one noise: the silos' sum has the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from silotune.communication.masks.shared_noise import SharedNoise
from silotune.core.tensors import Tensors
from silotune.methods.parts import Scope, names_with
from silotune.methods.phase import Phase
from silotune.training.context import TrainingContext
from silotune.training.phase_optimizer import Schedule


@dataclass(frozen=True)
class SharedStep:
    """The step of gradient descent that all silos take together in a round, `train.optimizer=sgd` on their sum.

    The server optimizer acts on its result, as on the mean of the silos' updates elsewhere.
    """

    noise: SharedNoise
    context: TrainingContext

    def __call__(self, total: Tensor, before: Tensors, number: int) -> tuple[Tensors, int]:
        """Return the shared tensors after a round's step, and the sum of the units.

        Args:
            total: the sum of the silos' summands, int64.
            before: the tensors of the broadcast that silos send.
            number: the round's.
        """
        context = self.context
        phase = step_of_shared(context, number)
        settings = context.train if phase.lr is None else context.train.with_lr(phase.lr)
        rate = Schedule.of(settings, 1, number, context.rounds).rate(0)
        gradient, units = self.noise.mean_gradient(total, before)
        return {
            name: (tensor.double() - rate * context.rate_factor(name) * gradient[name]).to(tensor.dtype)
            for name, tensor in before.items()
        }, units


def step_of_shared(context: TrainingContext, number: int) -> Phase:
    """Return the one phase of a round that changes shared parts; what has none or several is refused before a run."""
    shared = {*names_with(context.parts, Scope.SHARED)}
    (phase,) = (each for each in context.phases if each.runs_in(number) and shared & {*each.changes})
    return phase
