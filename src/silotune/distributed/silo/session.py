"""`Session.answer`: every reply of a silo (hello, training, scores), after all checks and notes in ledgers.

Torch runs here, in one thread. `Session.answer` makes every reply to a coordinator; `worker.py` answers pings, which
come from tools on the same machine.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from silotune.config import Config
from silotune.core.chained_log import ChainedLog
from silotune.core.clock import log_line
from silotune.core.determinism import key_named
from silotune.distributed.protocol.agreement import parse_wire_config, wire_config
from silotune.distributed.protocol.audit import describe_frame, request_of
from silotune.distributed.protocol.frames import PROTOCOL, Frame, ProtocolError, decode, require_fields
from silotune.distributed.protocol.handshake import HandshakeRefused, Identity, check_protocol, protocol_of
from silotune.distributed.silo.local_work import LocalWork
from silotune.distributed.silo.operation_status import operation_status
from silotune.distributed.silo.run_approval import WaitsForApproval, require_approval, still_approved
from silotune.distributed.silo.run_description import describe, describe_unfit
from silotune.distributed.silo.setup import DoesNotFit, SiloSetup
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.state_store import Reply, StateStore
from silotune.errors import InputError, SilotuneError
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation
from silotune.version import __version__


@dataclass(frozen=True)
class _Hello:
    """The last greeting that got a hello, with that hello, the run's id and its configuration."""

    request: bytes
    reply: bytes
    run: str
    config: Config


class Session:
    """Answers requests for one silo.

    Args:
        settings: the silo operator's.
    """

    def __init__(self, settings: SiloSettings) -> None:
        self.settings = settings
        self._setup = SiloSetup(settings)
        self._work = LocalWork(self._setup)
        self.record = ChainedLog(Path(settings.folder), settings.audit_mib * 2**20, settings.audit_mib_in_all * 2**20)
        """The audit log of what left."""
        self._last_hello: _Hello | None = None

    def warm(self) -> None:
        """Load backbone and rows for the agreed configuration, before the first request."""
        if self.settings.config is not None:
            text = Path(self.settings.config).read_text(encoding="utf-8")
            try:
                parse_wire_config(text)
            except InputError:  # not in the form of `wire_config`: rows are read again with the first request
                text = wire_config(read_config(self.settings.config), [self.settings.name])
            self._setup.federation_for(text, None)

    def answer(self, data: bytes) -> bytes:
        """Answer a request.

        Args:
            data: bytes of the request's frame.

        Returns:
            Bytes of the reply's frame: `refused` or `failed` with a reason if there is no other. Tracebacks stay in the
            silo's own log. The reply is in the audit log (`audit.jsonl`) by then.

        Raises:
            InputError, OSError: the audit log cannot be written; then nothing may leave.
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
        leaving = reply.frame.encode()
        if reply.frame.kind == "hello":
            assert request is not None, "it was answered"
            self._last_hello = _Hello(data, leaving, str(request.fields["run"]), self._setup.config)
        self.record.append({**request_of(request), **describe_frame(leaving, reply.frame), **reply.about})
        return leaving

    def known_hello(self, data: bytes) -> bytes | None:
        """Answer a greeting as before, without torch: for other threads, while a request is worked on.

        Args:
            data: bytes of the request's frame.

        Returns:
            The last hello, if the same greeting got it and the operator has not rejected the run since; else None.

        Raises:
            InputError, OSError: as `answer`.
        """
        known = self._last_hello
        if known is None or known.request != data or not still_approved(self.settings, known.run, known.config):
            return None
        self.record.append({**request_of(decode(data)), **describe_frame(known.reply)})
        return known.reply

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

    def _reason(self, kind: str, reason: str) -> Reply:
        log_line(f"silotune worker {self.settings.name!r}: {kind}: {reason}")
        return Reply(Frame(kind, {"silo": self.settings.name, "reason": reason}))

    def _answer(self, request: Frame) -> Reply:
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
        folder = Path(self.settings.folder)
        store = StateStore(folder, str(run), self._setup.policy.check_disk)
        if request.kind == "hello":
            self._work.check_rows(str(run))
            reply = self._hello(federation)
        elif request.kind in ("round", "final"):
            reply = self._work.train(federation, store, request)
        elif request.kind == "score":
            reply = self._work.score(federation, store, request)
        else:
            raise ProtocolError(f"unknown request {request.kind[:20]!r}")
        return self._with_status(reply, str(run), federation)

    def _with_status(self, reply: Reply, run: str, federation: Federation) -> Reply:
        """Add the silo's state of operation to a reply, where its operator shares it."""
        if "status" not in self.settings.share:
            return reply
        status = operation_status(self.settings, self._setup.rows_digest, run, federation.client().privacy)
        fields = reply.frame.fields | {"status": status.fields()}
        return replace(reply, frame=replace(reply.frame, fields=fields))

    def _approved(self, run: str, text: str, coordinators: Identity) -> Federation:
        """Return what a configuration comes to here, once the run is approved.

        Raises:
            WaitsForApproval: the operator has not decided, and alone learns whether the run fits the rows.
            SilotuneError: the run cannot take place here.
        """
        settings = self.settings
        try:
            federation = self._setup.federation_for(text, coordinators)
        except DoesNotFit as error:
            require_approval(settings, run, error.config, partial(describe_unfit, error.config, str(error.reason)))
            raise error.reason from error
        config = self._setup.config
        require_approval(settings, run, config, lambda: describe(config, federation, settings))
        return federation

    def _hello(self, federation: Federation) -> Reply:
        task = federation.tasks[self.settings.name]
        fields: dict[str, Any] = {
            "silo": self.settings.name,
            "identity": self._setup.identity().fields(),
            "task": task.fields(),
            "texts": federation.texts[self.settings.name],
        }
        if self._setup.bounded_rank is not None:
            fields["rank"] = self._setup.bounded_rank
        return Reply(Frame("hello", fields))
