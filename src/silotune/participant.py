"""A silo's side of the exchange: the coordinator's bytes in, the silo's bytes out. The same under every engine."""

from __future__ import annotations

from dataclasses import dataclass

from silotune.attack import magnified
from silotune.messages import Expected, read_broadcast, update_message
from silotune.parts import Scope
from silotune.silo import Silo, SiloState
from silotune.training import LocalResult, LocalTraining


@dataclass(frozen=True)
class Answer:
    """What a silo gives back: its message (empty where nothing is shared), and numbers and a remark for the log."""

    silo: str
    message: bytes
    metrics: dict[str, float]
    note: str = ""


class Participant:
    """Answers for a silo. Only what `update_message` makes of the shared parts is in an answer's message.

    Args:
        training: runs local rounds.
        expected: what a broadcast holds.
    """

    def __init__(self, training: LocalTraining, expected: Expected) -> None:
        self.training = training
        self.expected = expected

    def round(self, silo: Silo, broadcast: bytes) -> Answer:
        """One local round; the silo keeps its private parts and memory.

        Raises:
            MessageRefused: the broadcast is not as expected; the silo stays as it was.
        """
        shared, number = read_broadcast(broadcast, self.expected)
        result = self.training.round(silo, shared, number)
        message = b""
        if self.expected.shapes:
            sent = magnified(result.state, shared, self.training.parts, silo.attack_scale)
            message = update_message(sent, self.training.parts, number, silo.name, silo.rows)
        self._keep(silo, result)
        return Answer(silo.name, message, result.metrics, result.note)

    def final(self, silo: Silo, broadcast: bytes) -> Answer:
        """The method's final phases, from the last round's shared parts; nothing leaves the silo."""
        shared, number = read_broadcast(broadcast, self.expected)
        result = self.training.final(silo, shared, number)
        self._keep(silo, result)
        return Answer(silo.name, b"", result.metrics, result.note)

    def _keep(self, silo: Silo, result: LocalResult) -> None:
        """Store on the silo what stays there."""
        parts = self.training.parts
        silo.state = SiloState(
            {name: result.state[name] for name, part in parts.items() if part.scope is Scope.PRIVATE}, result.memory
        )
