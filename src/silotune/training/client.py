"""A silo's side of a round under every engine: from the broadcast's bytes to its reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silotune.communication.masks.fixed_point import SUMMAND, summand_message
from silotune.communication.messages import (
    Expected,
    MessageRefused,
    change_message,
    read_broadcast,
    shared_tensors,
    update_message,
)
from silotune.communication.privacy.accountant import Privacy
from silotune.communication.uplink.pipeline import NO_UPLINK, UplinkPipeline
from silotune.core.serialization import tensor_bytes
from silotune.core.tensors import State, Tensors, change_of, flatten, iter_change, total_norm
from silotune.errors import SilotuneError
from silotune.methods.parts import Part, Scope
from silotune.training.local_trainer import LocalTrainer
from silotune.training.row_privacy import question
from silotune.training.silo import Silo, SiloState
from silotune.training.silo_round import LocalResult

USES = "privacy/rounds"
"""The key in a silo's memory that counts the noised changes it has sent."""


@dataclass(frozen=True)
class PrivacySpent:
    """A silo's own record of its privacy spending: uses of the noise in this run, and ε of other runs."""

    uses: int = 0
    epsilon: float = 0.0


@dataclass(frozen=True)
class SiloReply:
    """A silo's reply: its message (empty if nothing is shared), and metrics and a note for the log.

    A metric that the silo keeps to itself is None. `norm` is the L2 norm of the change as the message has it; None
    unless the client measures it, and where nothing is shared.
    """

    silo: str
    message: bytes
    metrics: Mapping[str, float | None]
    note: str = ""
    norm: float | None = None


class SiloClient:
    """Trains silos and replies for them. A message holds the shared parts, or their change as the uplink encodes it.

    Args:
        trainer: runs local rounds and final phases.
        expected: silo → names and shapes of the tensors in its broadcast.
        uplink: encodes the change of the shared parts; an empty pipeline: the parts are sent unchanged.
        privacy: the guarantee of noise in the uplink; None: it adds none. Noise on rows is the context's `row_privacy`.
        measures: whether replies say the norm of their change.
        summands: the seed with which changes are rounded for sums under masks, and whether silos weigh by rows; a
            message then holds the silo's summand. None: updates are sent.
    """

    def __init__(
        self,
        trainer: LocalTrainer,
        expected: Callable[[str], Expected],
        uplink: UplinkPipeline = NO_UPLINK,
        privacy: Privacy | None = None,
        measures: bool = False,
        summands: tuple[int, bool] | None = None,
    ) -> None:
        self.trainer = trainer
        self.expected = expected
        self.uplink = uplink
        self.privacy = privacy
        self.measures = measures
        self.summands = summands
        self.run = ""
        """The run's name, on which the noise of a silo with a secret depends; a worker sets it."""
        self._last: tuple[bytes, State, int] | None = None

    def rounds(self, silos: Sequence[Silo], broadcast: bytes, spent: PrivacySpent = PrivacySpent()) -> list[SiloReply]:
        """Run one local round of silos that train together; each keeps its private parts and memory.

        The silos are of one rank; `spent` is what they have paid by their own records.

        Returns:
            One reply per silo, in the order of `silos`.

        Raises:
            MessageRefused: the broadcast is not as expected; all silos stay as they were.
            BudgetSpent: a reply would cost more than a silo's privacy budget has left; all silos stay as they were.
        """
        shared, number = self.open_broadcast(broadcast, silos[0].name)
        counts = self.privacy is not None and any(shared.values())
        uses = [self._next_use(silo.state.memory if silo.state else {}, spent) if counts else {} for silo in silos]
        results = self.trainer.rounds(silos, shared, number)
        return [
            self._reply(silo, result, shared, number, use)
            for silo, result, use in zip(silos, results, uses, strict=True)
        ]

    def open_broadcast(self, broadcast: bytes, silo: str) -> tuple[State, int]:
        """Read the shared parts and the round of a silo's broadcast; the same object is read once for all silos."""
        if self._last is None or self._last[0] is not broadcast:
            self._last = (broadcast, *read_broadcast(broadcast, self.expected(silo)))
        return self._last[1:]

    def _reply(self, silo: Silo, result: LocalResult, shared: State, number: int, uses: Tensors) -> SiloReply:
        memory = silo.state.memory if silo.state else {}
        message, norm = b"", None
        if any(shared.values()):
            parts = self.trainer.context.sent(number)
            before = flatten({name: shared.get(name, {}) for name in parts})
            update = scale_update(result.state, shared, parts, silo.attack_scale)
            if self.uplink.names:
                named = f"{self.uplink.run}{self.run}"
                round_digest = question(named, silo, number, shared, silo.state) if self.uplink.secret else ""
                trained = change_of(before, shared_tensors(update, parts))
                encoded, errors = self.uplink.send(trained, memory, silo.name, number, round_digest)
                # an error of a part that is drawn anew says nothing of the next one
                lasting = {key: error for key, error in errors.items() if not parts[key.split("/")[1]].redrawn}
                result.memory |= lasting | uses
                leaving = self.uplink.changes(encoded, before, silo.name, number)
            else:
                leaving = iter_change(before, shared_tensors(update, parts))
            noise = self.trainer.context.row_privacy
            if noise is not None and noise.shares is not None:
                if result.noised_sums is None:  # without the silo's share others are promised too much
                    raise SilotuneError(
                        "privacy.shares: the round has no step of shared parts, and so no share of noise"
                    )
                message = tensor_bytes({SUMMAND: noise.shares.summand(*result.noised_sums, before)})
            elif self.summands is not None:
                change, (seed, by_rows) = list(leaving), self.summands
                message = summand_message(change, silo.rows if by_rows else 1, seed, silo.name, number)
                leaving = iter(change)
            elif self.uplink.names:
                message = change_message(encoded, self.uplink.label, number, silo.name, silo.rows)
            else:
                message = update_message(update, parts, number, silo.name, silo.rows)
            norm = _norm(leaving) if self.measures else None
        self._keep(silo, result)
        return SiloReply(silo.name, message, result.metrics, result.note, norm)

    def _next_use(self, memory: Tensors, spent: PrivacySpent) -> Tensors:
        """Return the silo's count of noised changes including the next one."""
        assert self.privacy is not None, "the silo adds noise"
        uses = max(int(memory[USES]) if USES in memory else 0, spent.uses) + 1
        self.privacy.check(uses, spent.epsilon)
        return {USES: torch.tensor(uses)}

    def finals(self, silos: Sequence[Silo], broadcast: bytes) -> list[SiloReply]:
        """Run the method's final phases from the last round's shared parts; nothing leaves the silos."""
        if not silos:
            return []
        shared, number = self.open_broadcast(broadcast, silos[0].name)
        replies = []
        for silo, result in zip(silos, self.trainer.finals(silos, shared, number), strict=True):
            self._keep(silo, result)
            replies.append(SiloReply(silo.name, b"", result.metrics, result.note))
        return replies

    def _keep(self, silo: Silo, result: LocalResult) -> None:
        """Store the private parts and the memory on the silo."""
        parts = self.trainer.context.parts
        silo.state = SiloState(
            {name: result.state[name] for name, part in parts.items() if part.scope is Scope.PRIVATE}, result.memory
        ).compact()


def _norm(changes: Iterable[tuple[str, Tensor]]) -> float:
    """Return the L2 norm of a change; NaN if it diverged so far that the coordinator cannot decode it either."""
    try:
        return total_norm((change for _, change in changes), "l2")
    except MessageRefused:
        return math.nan


def scale_update(state: State, received: State, parts: Mapping[str, Part], scale: float) -> State:
    """Scale the change of the shared parts: `received + scale·(trained − received)`.

    Model replacement (Bagdasaryan et al. 2020, eq. 3): if a silo has weight w in the mean, a scale of 1/w makes the
    aggregate the attacker's model, as far as the others' changes cancel. Under a uniform mean 1/w is the number of
    silos in the round; under a mean by rows it is the number of all their rows over that of the attacker's. Private
    parts are returned unchanged; at a scale of 1 all parts are, to the bit.
    """
    if scale == 1:
        return state
    shared = {name for name, part in parts.items() if part.scope is Scope.SHARED}
    return {
        name: {
            key: (received[name][key].double() + scale * (tensor.double() - received[name][key].double())).to(tensor)
            for key, tensor in tensors.items()
        }
        if name in shared
        else tensors
        for name, tensors in state.items()
    }
