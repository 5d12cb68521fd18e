"""`Session.answer`: every reply of a silo: hello, training, scores, each after all checks and records.

Torch runs here, in one thread. `Session.answer` makes every reply to a coordinator; `worker.py` answers pings, which
come from tools on the same machine.
"""

from __future__ import annotations

import hashlib
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from silotune.communication.aggregation import change_norm
from silotune.communication.messages import message_numbers, read_broadcast, with_rows
from silotune.core.chained_log import ChainedLog
from silotune.core.clock import log_line
from silotune.core.determinism import key_named
from silotune.core.tensors import State, flatten
from silotune.distributed.protocol.agreement import parse_wire_config, wire_config
from silotune.distributed.protocol.audit import describe_frame, request_of
from silotune.distributed.protocol.disclosure import filter_metrics, filter_scores
from silotune.distributed.protocol.frames import PROTOCOL, Frame, ProtocolError, decode, require_fields, state_name
from silotune.distributed.protocol.handshake import (
    HandshakeRefused,
    Identity,
    check_protocol,
    fields_digest,
    protocol_of,
    text_digest,
)
from silotune.distributed.silo.admission import WaitsForApproval, require_approval
from silotune.distributed.silo.operation_status import operation_status
from silotune.distributed.silo.policy import backbone_numbers
from silotune.distributed.silo.privacy_ledger import Price, PrivacyLedger
from silotune.distributed.silo.request_ledger import Entry
from silotune.distributed.silo.run_description import describe, describe_unfit
from silotune.distributed.silo.setup import UNDISCLOSED_ROWS, SiloSetup, UnfitRun
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.state_store import StateStore, scores_name
from silotune.errors import InputError, SilotuneError
from silotune.evaluation.federation_scores import score_silos, summary_entries
from silotune.evaluation.instance_vectors import keep_instances
from silotune.runs.build.resolve import read_config
from silotune.training.client import PrivacySpent
from silotune.training.federation import Federation
from silotune.training.silo import Silo, SiloState
from silotune.version import __version__


class Session:
    """Answers requests for one silo.

    Args:
        settings: the silo operator's.
    """

    def __init__(self, settings: SiloSettings) -> None:
        self.settings = settings
        self._setup = SiloSetup(settings)
        self.record = ChainedLog(Path(settings.folder), settings.audit_mib * 2**20)
        """The record of what left."""

    def warm(self) -> None:
        """Load backbone and rows for the agreed configuration, before the first request."""
        if self.settings.config is not None:
            text = Path(self.settings.config).read_text(encoding="utf-8")
            try:
                parse_wire_config(text)
            except InputError:  # not in the form of `wire_config`: rows are read again with the first request
                text = wire_config(read_config(self.settings.config), [self.settings.name])
            self._setup(text, None)

    def answer(self, data: bytes) -> bytes:
        """Answer a request.

        Args:
            data: bytes of the request's frame.

        Returns:
            Bytes of the reply's frame: `refused` or `failed` with a reason if there is no other. Tracebacks stay in the
            silo's own log. The reply is in the record of what left (`audit.jsonl`) by then.

        Raises:
            InputError, OSError: the record cannot be written; then nothing may leave.
        """
        request: Frame | None = None
        try:
            with key_named():
                request = decode(data)
                reply = self._answer(request)
        except WaitsForApproval as error:
            reply = self._reason("waiting", str(error))
        except HandshakeRefused as error:
            reply = self._reason("refused", str(error))
        except ProtocolError as error:
            reply = self._reason("failed", f"request: {error}")
        except SilotuneError as error:
            reply = self._reason("failed", self._without_paths(str(error)))
        except Exception as error:  # its text may quote rows
            traceback.print_exc()
            reply = self._reason("failed", f"{type(error).__name__} (see the worker's log)")
        leaving = reply.encode()
        self.record.append(self._recorded(request, reply, leaving))
        return leaving

    def _recorded(self, request: Frame | None, reply: Frame, leaving: bytes) -> dict[str, Any]:
        """Return the line of the record for a reply: the request's run and round, and the bytes that leave."""
        line = {**request_of(request), **describe_frame(leaving, reply)}
        if request is not None and line["kind"] == "answer" and line["numbers"]:
            federation = self._setup.federation
            line["norm"] = _change_norm(federation, request.blobs["broadcast"], reply.blobs["message"])
            privacy = federation.client().privacy
            line["epsilon"] = None if privacy is None else Price.of(privacy).epsilon
        return line

    def _without_paths(self, reason: str) -> str:
        """Remove local paths from error messages before they leave the silo."""
        settings = self.settings
        paths = [
            settings.folder,
            settings.rows,
            settings.backbone.name,
            settings.start,
            settings.secret,
            settings.config,
        ]
        paths.append(None if settings.data is None else settings.data.path)
        for path in sorted({path for path in paths if path and "/" in path}, key=len, reverse=True):
            reason = reason.replace(path, f"…/{Path(path).name}")
        return reason

    def _reason(self, kind: str, reason: str) -> Frame:
        log_line(f"silotune worker {self.settings.name!r}: {kind}: {reason}")
        return Frame(kind, {"silo": self.settings.name, "reason": reason})

    def _answer(self, request: Frame) -> Frame:
        run, text, identity = require_fields(request.fields, "run", "config", "identity")
        check_protocol(self.settings.name, protocol_of(identity), PROTOCOL)
        coordinators = Identity.read(identity)
        if coordinators.version != __version__:
            silo = f"silo {self.settings.name!r}"
            raise HandshakeRefused(
                f"{silo}: another silotune: {__version__}, the coordinator's: {coordinators.version}"
            )
        self._setup.guard.begin()
        federation = self._approved(str(run), str(text), coordinators)
        self._setup.check_shapes(coordinators)
        if request.kind == "hello":
            return self._with_status(self._hello(federation), str(run), federation)
        store = StateStore(Path(self.settings.folder), str(run))
        if request.kind in ("round", "final"):
            return self._with_status(self._train(federation, store, request), str(run), federation)
        if request.kind == "score":
            return self._with_status(self._score(federation, store, request), str(run), federation)
        raise ProtocolError(f"unknown request {request.kind[:20]!r}")

    def _with_status(self, reply: Frame, run: str, federation: Federation) -> Frame:
        """Add the silo's state of operation to a reply, where its operator shares it."""
        if "status" not in self.settings.share:
            return reply
        status = operation_status(self.settings, self._setup.rows, run, federation.client().privacy)
        return Frame(reply.kind, reply.fields | {"status": status.fields()}, reply.blobs)

    def _approved(self, run: str, text: str, coordinators: Identity) -> Federation:
        """Return what a configuration comes to here, once the run is approved.

        Raises:
            WaitsForApproval: the operator has not decided, and alone learns whether the run fits the rows.
            SilotuneError: the run cannot take place here.
        """
        settings, policy = self.settings, self._setup.policy
        try:
            federation = self._setup(text, coordinators)
        except UnfitRun as unfit:
            described = partial(describe_unfit, unfit.config, str(unfit))
            require_approval(settings, policy, run, unfit.config, described)
            raise unfit.reason from unfit
        config = self._setup.config
        assert config is not None, "it was built"
        require_approval(settings, policy, run, config, lambda: describe(config, federation, settings))
        return federation

    def _hello(self, federation: Federation) -> Frame:
        task = federation.tasks[self.settings.name]
        fields = {
            "silo": self.settings.name,
            "identity": self._setup.identity().fields(),
            "task": asdict(task) | {"labels": list(task.labels)},
            "texts": federation.texts[self.settings.name],
        }
        return Frame("hello", fields)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _train(self, federation: Federation, store: StateStore, request: Frame) -> Frame:
        """Run a local round or the final phases; a repeated request gets the kept reply without training again."""
        number, base, keep = require_fields(request.fields, "round", "base", "keep")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        final = request.kind == "final"
        name = state_name(int(number), final)
        judge = bool(request.fields.get("judge")) and not final
        key = self._request_key(request, judge=str(judge), base=str(base))
        kept = store.find_reply(name, key)
        if kept is not None:
            return self._filtered(kept)
        silo = self._silo(federation, store, str(base))
        client = federation.client()
        shared = self._checked(client.open_broadcast(broadcast), int(number))
        leaving = 0 if final else sum(tensor.numel() for tensor in flatten(shared).values())
        digest = self._work_digest(key, store, str(base))
        self._count(federation, Entry(store.path.name, request.kind, int(number), digest, leaving))
        scores_before: dict[str, Any] = {}
        if judge:  # of the previous round, whose shared parts the broadcast holds
            self._count(federation, Entry(store.path.name, "score", int(number), digest))
            scores_before = self._evaluate(federation, silo, shared, ["validation"], store)
        store.delete(before=int(number), keep={*map(str, keep), str(base)})  # a refused request deletes nothing
        if final:
            (reply,) = client.finals([silo], broadcast)
        else:
            ledger, run = PrivacyLedger(Path(self.settings.folder)), store.path.name
            price = None if client.privacy is None else Price.of(client.privacy)
            spent = PrivacySpent() if price is None else ledger.spent(run, price)
            (reply,) = client.rounds([silo], broadcast, spent)
            if reply.message:
                self._setup.policy.check_numbers(message_numbers(reply.message), federation.backbone)
                if price is not None:
                    ledger.record(run, name, price)
        assert silo.state is not None, "a silo that trained has a state"
        store.write(name, silo.state.flat())
        fields = {"silo": silo.name, "round": int(number), "state": name, "metrics": reply.metrics, "note": reply.note}
        if judge:
            fields["scores"] = scores_before
        frame = Frame("answer", fields, {"message": reply.message})
        store.keep_reply(name, key, frame)
        return self._filtered(frame)

    def _filtered(self, reply: Frame) -> Frame:
        """Keep the numbers that may leave now; a kept reply may be older than the operator's settings."""
        share, fields, blobs = self.settings.share, dict(reply.fields), dict(reply.blobs)
        fields["metrics"] = filter_metrics(fields["metrics"], share)
        if "scores" in fields:
            fields["scores"] = filter_scores(fields["scores"], share)
        if "rows" not in share and blobs["message"]:
            blobs["message"] = with_rows(blobs["message"], UNDISCLOSED_ROWS)
        return Frame(reply.kind, fields, blobs)

    def _score(self, federation: Federation, store: StateStore, request: Frame) -> Frame:
        """Score the aggregated shared parts with this silo's private ones; computed once, as `_train`."""
        number, base, splits = require_fields(request.fields, "round", "base", "splits")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        name, splits = scores_name(int(number)), [str(split) for split in splits]
        if splits not in (["validation"], ["validation", "test"]):
            raise ProtocolError(f"no such splits to score: {splits!r:.60}")
        key = self._request_key(request, base=str(base), splits=",".join(splits), share=",".join(self.settings.share))
        kept = store.find_reply(name, key)
        if kept is not None:
            return kept
        silo = self._silo(federation, store, str(base))
        shared = self._checked(read_broadcast(broadcast, federation.coordinator.expected), int(number))
        digest = self._work_digest(key, store, str(base))
        self._count(federation, Entry(store.path.name, "score", int(number), digest))
        entry = self._evaluate(federation, silo, shared, splits, store)
        reply = Frame("scores", {"silo": self.settings.name, "scores": entry})
        store.keep_reply(name, key, reply)
        return reply

    def _count(self, federation: Federation, entry: Entry) -> None:
        """Count a request before it is worked on, and the choice of rows that it uses."""
        self._setup.use_rows()
        self._setup.limits.admit(entry, federation.config, backbone_numbers(federation.backbone))

    def _checked(self, broadcast: tuple[State, int], asked: int) -> State:
        """Return the shared parts of a broadcast that the policy allows, and that is of the round that is asked for.

        The broadcast's number decides the order of rows, the request's is counted.
        """
        shared, number = broadcast
        if number != asked:
            raise ProtocolError(f"a broadcast of round {number} in a request for round {asked}")
        self._setup.policy.check_broadcast(shared, self._setup.start)
        return shared

    def _work_digest(self, key: dict[str, str], store: StateStore, base: str) -> str:
        """Return the digest by which a request is counted: with another content of its state it is another request."""
        return fields_digest({**key, "state": store.digest(base)} if base else key)

    def _request_key(self, request: Frame, **more: str) -> dict[str, str]:
        """Return the fields in which two requests must agree to get the same reply."""
        return {
            "kind": request.kind,
            "broadcast": hashlib.sha256(request.blobs["broadcast"]).hexdigest(),
            "config": text_digest(self._setup.text),
            **more,
        }

    def _evaluate(
        self, federation: Federation, silo: Silo, shared: State, splits: list[str], store: StateStore
    ) -> dict[str, Any]:
        """Score shared parts with the silo's present private ones; returns what may leave."""
        federation.coordinator.adopt(shared)
        if splits == ["validation"]:
            entry: dict[str, Any] = {"validation": score_silos(federation, "validation")[self.settings.name]}
        else:
            entry = summary_entries(federation)[self.settings.name]
            keep_instances(store.path, [silo])
        return filter_scores(entry, self.settings.share)

    def _silo(self, federation: Federation, store: StateStore, base: str) -> Silo:
        """Return the silo at one of its states; the empty name stands for the state before its first round."""
        silo = federation.silos[self.settings.name]
        silo.state = None
        if base:
            kept = SiloState.from_flat(store.read(base))
            wanted = {name: tensor.shape for name, tensor in flatten(federation.context.state_of(silo).private).items()}
            if {name: tensor.shape for name, tensor in flatten(kept.private).items()} != wanted:
                raise InputError(f"silo {self.settings.name!r}: its state {base!r} is of another method or tuner")
            silo.state = kept
        return silo


def _change_norm(federation: Federation, broadcast: bytes, message: bytes) -> float:
    """Return the L2 norm of the change that a message holds against the broadcast it answers."""
    coordinator = federation.coordinator
    before = flatten(read_broadcast(broadcast, coordinator.expected)[0])
    return change_norm(coordinator.read_message(message, before)[0], before)
