"""The coordinator of a federation in sums under masks: members and attempts of a round, and its requests to silos.

Which silos are in the last list of survivors is written down before any silo is asked to sign it: after a crash the
round is repeated with that list, which is the only one that the silos sign again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from silotune.communication.masks.agreement import Agreement, threshold_of
from silotune.communication.masks.coordinator import Requests, Sum, SumFailed, masked_sum
from silotune.communication.masks.silo import Answer
from silotune.config.coordinator import FederationConfig
from silotune.core.files import damage_named, read_json, write_text
from silotune.core.numeric import ceil_fraction
from silotune.core.serialization import read_tensors
from silotune.core.tensors import State, digest, flatten
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.coordinator.job import AdmissionPolicy
from silotune.distributed.protocol.frames import MASKED, Frame
from silotune.distributed.protocol.handshake import text_digest
from silotune.errors import SilotuneError

MakeRequest = Callable[..., bytes]
"""Called with a silo's name and further fields; returns the bytes of a request for the round."""


class MaskedRounds:
    """Makes the sums of a run's rounds.

    Args:
        folder: for the file with the survivors of the last sum.
        dispatcher: sends the requests.
        options: the run's section `federation`.
        run: fields of every request.
        admission: knows what silos said of their pinned lists.
    """

    def __init__(
        self,
        folder: Path,
        dispatcher: SiloDispatcher,
        options: FederationConfig,
        run: Mapping[str, Any],
        admission: AdmissionPolicy,
    ) -> None:
        self._file = folder / "survivors.json"
        self._dispatcher = dispatcher
        self._options = options
        self._run = run
        self._admission = admission
        self.sent: dict[str, bytes] = {}
        """Silo → all that it sent for the last sum."""
        self.received: dict[str, int] = {}
        """Silo → the bytes of other silos that it was sent."""

    def members(self, silos: Sequence[str]) -> list[str]:
        """Return the silos that have not dropped out of the run."""
        _, survivors = self._noted()
        return [name for name in silos if survivors is None or name in survivors]

    def sum(
        self,
        number: int,
        numbers: int,
        shared: State,
        broadcast: bytes,
        trained: Sequence[str],
        asked: int,
        request: MakeRequest,
        failed: Callable[[str, str], None],
    ) -> Sum:
        """Return the sum of a round's summands; below the quorum it is tried again, as `federation.retries` says.

        Args:
            number: the round.
            numbers: how many a summand has.
            shared: the shared parts in its broadcast.
            broadcast: the message.
            trained: the silos that have summands, in order.
            asked: how many silos were asked to train.
            request: makes a silo's request.
            failed: called with silo and reason.

        Raises:
            SilotuneError: too few silos are left; nothing was revealed.
        """
        lists = self._admission.peers.values()
        pinned, peers = max(each.silos for each in lists), next(each.peers for each in lists)
        least = max(ceil_fraction(self._options.quorum, asked), *(each.least for each in lists))
        threshold = threshold_of(pinned)
        config, opened = text_digest(self._run["config"]), hashlib.sha256(broadcast).hexdigest()
        tensors = digest(flatten(shared))
        problem, reasons = "", {}
        for _ in range(self._options.retries + 1):
            members = tuple(self.members(trained))
            attempt = secrets.token_hex(8)
            agreement = Agreement(
                self._run["run"], number, attempt, config, opened, tensors, numbers, members, peers, threshold
            )
            self.sent, self.received = dict.fromkeys(members, b""), dict.fromkeys(members, 0)

            def note(silo: str, reason: str) -> None:
                reasons[silo] = reason
                failed(silo, reason)

            try:
                return masked_sum(
                    agreement, least, self._asking(agreement, request, note), partial(self._note, tensors)
                )
            except SumFailed as error:
                problem = str(error)
        said = "".join(f"; {silo}: {reason}" for silo, reason in sorted(reasons.items()))
        raise SilotuneError(
            f"round {number}: no sum under masks, and nothing was revealed: {problem}{said}; what is finished is kept "
            "(run again with --resume)"
        )

    def _noted(self) -> tuple[str, list[str] | None]:
        """Return the digest of the last sum's broadcast tensors, and its survivors; None before the first sum."""
        if not self._file.exists():
            return "", None
        with damage_named(self._file):
            noted = read_json(self._file)
            return noted["tensors"], noted["survivors"]

    def _note(self, tensors: str, survivors: list[str]) -> None:
        """Write down the survivors; refuse others than an earlier attempt at the same broadcast had."""
        known, before = self._noted()
        if known == tensors and before is not None and before != survivors:
            missing = ", ".join(name for name in before if name not in survivors)
            raise SumFailed(f"the sum of {', '.join(before)} was begun, and no other can be made; missing: {missing}")
        write_text(self._file, json.dumps({"tensors": tensors, "survivors": survivors}))

    def _asking(
        self, agreement: Agreement, request: MakeRequest, failed: Callable[[str, str], None]
    ) -> Callable[[str, Requests], dict[str, Answer]]:
        proposal = agreement.values()

        def ask(stage: str, asked: Requests) -> dict[str, Answer]:
            requests = {
                name: request(name, stage=stage, agreement=proposal, asked=fields) for name, fields in asked.items()
            }
            answers: dict[str, Answer] = {}
            for frame in self._dispatcher.request(requests, self._options.deadline, self._options.away):
                silo, told = str(frame.fields["silo"]), frame.fields.get("told")
                answers_this = (frame.fields.get("stage"), frame.fields.get("attempt")) == (stage, agreement.attempt)
                if frame.kind != "masks" or not answers_this or not isinstance(told, dict):
                    failed(silo, f"{stage}: {frame.fields.get('reason', 'answered something else')}")
                    continue
                answers[silo] = told, _masked(frame)
                self.sent[silo] += json.dumps(told).encode() + answers[silo][1]
                self.received[silo] += len(json.dumps(asked[silo]))
            return answers

        return ask


def _masked(frame: Frame) -> bytes:
    """Return the masked numbers of a reply; nothing if there are none, or something else."""
    try:
        return read_tensors(frame.blobs[MASKED])[MASKED].numpy().tobytes()
    except (KeyError, SafetensorError, ValueError, TypeError):
        return b""
