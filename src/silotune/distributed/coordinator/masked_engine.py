"""Runs the rounds of a federation as sums under masks: which silos take part, attempts, and requests to silos.

Which silos are in the last list of survivors is written down before any silo is asked to sign it: after a crash the
round is repeated with that list, which is the only one that the silos sign again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from safetensors import SafetensorError
from typing_extensions import override

from silotune.communication.masks.agreement import FIRST, Agreement, base_after, rounds_of_keys
from silotune.communication.masks.coordinator import RoundKeys, SumFailed, masked_sum
from silotune.communication.masks.fixed_point import Sum, threshold_of
from silotune.communication.masks.silo import STAGES, StageAnswer, Texts
from silotune.core.files import damage_named, read_json, write_text
from silotune.core.numeric import ceil_fraction
from silotune.core.serialization import read_tensors
from silotune.core.tensors import digest, flatten
from silotune.distributed.coordinator.engine import FlowerEngine
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER
from silotune.distributed.flower.link import ConnectionLost
from silotune.distributed.protocol.frames import MASKED, Frame
from silotune.distributed.protocol.handshake import parse_wire_config, recipe_digest, text_digest
from silotune.errors import SilotuneError
from silotune.runs.engines.base import Broadcast
from silotune.training.coordinator import Received

SURVIVORS = f"{FEDERATION_FOLDER}/survivors.json"

END_DEADLINE = 20.0
"""Seconds to wait until silos have erased their secrets at the end of a run."""


class MaskedEngine(FlowerEngine):
    """Runs the rounds of a federation whose coordinator learns sums alone (`aggregation.secure`)."""

    _keys: tuple[Agreement, RoundKeys] | None = None

    @override
    def run(self) -> None:
        try:
            super().run()
        except ConnectionLost:
            raise
        except SilotuneError:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        """Have all silos erase what they keep for sums; a run that failed and is resumed makes its next sum anew."""
        last = self._last.round if self._last else 0
        requests = {name: self._request("end", last, name) for name in sorted(self.federation.silos)}
        for _ in self._dispatcher.request(requests, min(self._options.deadline, END_DEADLINE)):
            pass

    @override
    def rounds(self, round_number: int, silos: Sequence[str], broadcast: Broadcast) -> Iterator[Received]:
        """Request rounds from the silos that have not dropped out of the run, and then the sum of what they trained."""
        members = self._staying(silos)
        trained = {one.reply.silo: one.reply for one in super().rounds(round_number, members, broadcast)}
        total = self._sum(round_number, sorted(trained), members)
        yield from self.federation.coordinator.receive_sum(round_number, total, trained)

    def _sum(self, number: int, trained: Sequence[str], invited: Sequence[str]) -> Sum:
        """Return the sum of what silos have trained, of those that were invited to; try again, if silos drop out.

        Raises:
            SilotuneError: too few silos are left; nothing was revealed.
        """
        coordinator, (*_, fewest) = self.federation.coordinator, self._admission.pinned
        least, problem = max(ceil_fraction(self._options.quorum, len(invited)), fewest), ""
        tensors, numbers = digest(flatten(coordinator.shared)), coordinator.summand_length(number)
        noted = self._noted()
        base = noted["base"] if noted.get("round") == number else noted.get("after", FIRST)
        after = base_after(base, number, recipe_digest(parse_wire_config(self._run["config"])), tensors)
        record: dict[str, Any] = {"round": number, "tensors": tensors, "base": base, "after": after}
        for _ in range(self._options.retries + 1):
            shared, made_keys = self._keys_of(number, self._staying(trained))
            agreement = replace(shared, round=number, broadcast=tensors, base=base, numbers=numbers)
            try:
                ask, note = partial(self._ask, agreement), partial(self._note, record)
                return masked_sum(agreement, least, ask, note, made_keys)
            except SumFailed as error:
                problem, self._keys = str(error), None
        reasons = "".join(f"; {silo}: {self._reasons[silo]}" for silo in invited if silo in self._reasons)
        raise SilotuneError(
            f"round {number}: no sum under masks, and nothing was revealed: {problem}{reasons}; what is finished is "
            "kept (run again with --resume)"
        )

    def _keys_of(self, number: int, members: list[str]) -> tuple[Agreement, RoundKeys]:
        """Return the agreement on keys of these members for a round, and the keys: new ones for several rounds."""
        if self._keys is None or not self._keys[0].has_keys(number, members):
            fingerprint, silos, _ = self._admission.pinned
            core = self._run["run"], number, secrets.token_hex(8), text_digest(self._run["config"]), "", "", 0, members
            noise, rounds = self._admission.shares, rounds_of_keys(number, self.federation.rounds)
            self._keys = Agreement(*core, fingerprint, threshold_of(silos), noise, number, rounds), RoundKeys()
        return self._keys

    def _staying(self, silos: Sequence[str]) -> list[str]:
        """Return the silos that have not dropped out of the run."""
        survivors = self._noted().get("survivors", silos)
        return [name for name in silos if name in survivors]

    def _noted(self) -> dict[str, Any]:
        """Return what was noted of the last sum; nothing before the first."""
        file = self.folder.path / SURVIVORS
        with damage_named(file):
            return dict(read_json(file)) if file.exists() else {}

    def _note(self, record: Mapping[str, Any], survivors: list[str]) -> None:
        """Write down a sum and its survivors; refuse others than an earlier attempt at the same broadcast had."""
        noted = self._noted()
        if noted.get("tensors") == record["tensors"] and (before := noted["survivors"]) != survivors:
            missing = ", ".join(name for name in before if name not in survivors)
            raise SumFailed(f"the sum of {', '.join(before)} was begun, and no other can be made; missing: {missing}")
        write_text(self.folder.path / SURVIVORS, json.dumps({**record, "survivors": survivors}))

    def _ask(self, agreement: Agreement, stage: str, messages: Mapping[str, Texts]) -> dict[str, StageAnswer]:
        """Send the requests of a stage and return the answers; why a silo has none is kept."""
        proposed = asdict(agreement.keys if stage in STAGES[:2] else agreement)
        stage_request = partial(self._request, "masks", agreement.round, agreement=proposed, stage=stage)
        requests = {name: stage_request(name, shown=texts) for name, texts in messages.items()}
        answers: dict[str, StageAnswer] = {}
        self._reasons |= dict.fromkeys(messages, f"{stage}: no answer")
        for frame in self._dispatcher.request(requests, self._options.deadline, self._options.away):
            silo, answer = str(frame.fields["silo"]), frame.fields.get("told")
            if frame.kind == "masks" and isinstance(answer, dict):
                answers[silo] = answer, _masked(frame)
                del self._reasons[silo]
                continue
            self._failed(agreement.round, silo, f"{stage}: {frame.fields.get('reason', 'answered something else')}")
        return answers


def _masked(frame: Frame) -> bytes:
    """Return the masked numbers of a reply; nothing if there are none, or something else."""
    try:
        return read_tensors(frame.blobs[MASKED])[MASKED].numpy().tobytes()
    except (KeyError, SafetensorError, ValueError, TypeError):
        return b""
