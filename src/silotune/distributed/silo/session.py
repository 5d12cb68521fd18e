"""A silo's side of one run: backbone, tokenized rows and state, and what is answered to the coordinator's requests.

Torch runs here, in one thread. Every answer to a coordinator is made by `Session.answer` (to a ping, which tools on the
same machine ask, `worker.py` says its name, process and whether it is busy).
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silotune.communication.messages import read_broadcast, with_rows
from silotune.core.tensors import State, flatten
from silotune.distributed.protocol.agreement import parse_wire_config, wire_config
from silotune.distributed.protocol.disclosure import filter_metrics, filter_scores
from silotune.distributed.protocol.frames import PROTOCOL, Frame, ProtocolError, decode, require_fields, state_name
from silotune.distributed.protocol.handshake import (
    HandshakeRefused,
    Identity,
    check_protocol,
    protocol_of,
    text_digest,
)
from silotune.distributed.silo.privacy_ledger import Price, PrivacyLedger
from silotune.distributed.silo.setup import SiloSetup
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.state_store import StateStore, scores_name
from silotune.errors import InputError, SilotuneError
from silotune.evaluation.instance_vectors import keep_instances
from silotune.evaluation.scores import results, scores
from silotune.runs.build.resolve import read_config
from silotune.training.client import PrivacySpent
from silotune.training.federation import Federation
from silotune.training.silo import Silo, SiloState
from silotune.version import __version__

_UNDISCLOSED_ROWS = 1
"""The row count of a silo that does not say how many it has."""


class _SiloWithoutRowCount(Silo):
    """A silo that does not say how many rows it has."""

    @property
    def rows(self) -> int:
        return _UNDISCLOSED_ROWS


class Session:
    """Answers for one silo.

    Args:
        local: the operator's configuration.
    """

    def __init__(self, local: SiloSettings) -> None:
        self.local = local
        self._setup = SiloSetup(local)

    def warm(self) -> None:
        """Load backbone and rows for the agreed configuration, before anybody asks."""
        if self.local.config is not None:
            text = Path(self.local.config).read_text(encoding="utf-8")
            try:
                parse_wire_config(text)
            except InputError:  # as a person writes it; the backbone will be there, rows come with the first request
                text = wire_config(read_config(self.local.config), [self.local.name])
            self._setup(text, None)

    def answer(self, data: bytes) -> bytes:
        """The answer to a request; a reason where there is none. Tracebacks stay in the silo's own log."""
        try:
            return self._answer(decode(data)).encode()
        except HandshakeRefused as error:
            return self._reason("refused", str(error))
        except ProtocolError as error:
            return self._reason("failed", f"request: {error}")
        except SilotuneError as error:
            return self._reason("failed", self._without_paths(str(error)))
        except Exception as error:  # the text may quote rows: only its kind leaves
            traceback.print_exc()
            return self._reason("failed", f"{type(error).__name__} (see the worker's log)")

    def _without_paths(self, reason: str) -> str:
        """Where things lie on this machine is nobody else's business."""
        local = self.local
        paths = [local.folder, local.rows, local.backbone, local.start, local.secret, local.config]
        paths.append(None if local.data is None else local.data.path)
        for path in sorted({path for path in paths if path and "/" in path}, key=len, reverse=True):
            reason = reason.replace(path, f"…/{Path(path).name}")
        return reason

    def _reason(self, kind: str, reason: str) -> bytes:
        print(f"silotune worker {self.local.name!r}: {kind}: {reason}", file=sys.stderr, flush=True)
        return Frame(kind, {"silo": self.local.name, "reason": reason}).encode()

    def _answer(self, request: Frame) -> Frame:
        run, text, said = require_fields(request.fields, "run", "config", "identity")
        check_protocol(self.local.name, protocol_of(said), PROTOCOL)
        theirs = Identity.read(said)
        if theirs.version != __version__:
            raise HandshakeRefused(
                f"silo {self.local.name!r}: another silotune: {__version__}, the coordinator's: {theirs.version}"
            )
        federation = self._setup(str(text), theirs)
        if request.kind == "hello":
            return self._hello(federation)
        store = StateStore(Path(self.local.folder), str(run))
        if request.kind in ("round", "final"):
            return self._train(federation, store, request)
        if request.kind == "score":
            return self._score(federation, store, request)
        raise ProtocolError(f"unknown request {request.kind[:20]!r}")

    def _hello(self, federation: Federation) -> Frame:
        task = federation.tasks[self.local.name]
        fields = {
            "silo": self.local.name,
            "identity": self._setup.identity().fields(),
            "task": asdict(task) | {"labels": list(task.labels)},
            "texts": federation.texts[self.local.name],
        }
        return Frame("hello", fields)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _train(self, federation: Federation, store: StateStore, request: Frame) -> Frame:
        """A local round, or the final phases; the same question gets the same answer, without training twice."""
        number, base, keep = require_fields(request.fields, "round", "base", "keep")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        final = request.kind == "final"
        name = state_name(int(number), final)
        judge = bool(request.fields.get("judge")) and not final
        asked = self._question(request, judge=str(judge), base=str(base))
        known = store.answered(name, asked)
        if known is not None:
            return self._shared(known)
        store.forget({*map(str, keep), str(base)}, before=int(number))
        silo = self._silo(federation, store, str(base))
        client = federation.client()
        judged = (
            self._evaluate(federation, silo, client.open_broadcast(broadcast)[0], ["validation"], store)
            if judge
            else {}
        )
        if final:
            (made,) = client.finals([silo], broadcast)
        else:
            ledger, run = PrivacyLedger(Path(self.local.folder)), store.path.name
            price = None if client.privacy is None else Price.of(client.privacy)
            spent = PrivacySpent() if price is None else ledger.spent(run, price)
            (made,) = client.rounds([silo], broadcast, spent)
            if price is not None and made.message:
                ledger.record(run, name, price)
        assert silo.state is not None, "a silo that trained has a state"
        store.write(name, silo.state.flat())
        fields = {"silo": silo.name, "round": int(number), "state": name, "metrics": made.metrics, "note": made.note}
        if judge:  # of the round before: its shared parts are what this round begins with
            fields["scores"] = judged
        answer = Frame("answer", fields, {"message": made.message})
        store.keep_reply(name, asked, answer)
        return self._shared(answer)

    def _shared(self, answer: Frame) -> Frame:
        """An answer with the numbers that may leave by now: it may be one that was kept when others might."""
        share, fields, blobs = self.local.share, dict(answer.fields), dict(answer.blobs)
        fields["metrics"] = filter_metrics(fields["metrics"], share)
        if "scores" in fields:
            fields["scores"] = filter_scores(fields["scores"], share)
        if "rows" not in share and blobs["message"]:
            blobs["message"] = with_rows(blobs["message"], _UNDISCLOSED_ROWS)
        return Frame(answer.kind, fields, blobs)

    def _score(self, federation: Federation, store: StateStore, request: Frame) -> Frame:
        """Scores of the aggregated shared parts with this silo's own private ones; computed once, as `_train`."""
        number, base, splits = require_fields(request.fields, "round", "base", "splits")
        (broadcast,) = require_fields(request.blobs, "broadcast")
        name, chosen = scores_name(int(number)), [str(split) for split in splits]
        asked = self._question(request, base=str(base), splits=",".join(chosen), share=",".join(self.local.share))
        known = store.answered(name, asked)
        if known is not None:
            return known
        silo = self._silo(federation, store, str(base))
        shared, _ = read_broadcast(broadcast, federation.coordinator.expected)
        found = self._evaluate(federation, silo, shared, chosen, store)
        answer = Frame("scores", {"silo": self.local.name, "scores": found})
        store.keep_reply(name, asked, answer)
        return answer

    def _question(self, request: Frame, **more: str) -> dict[str, str]:
        """What makes two requests the same."""
        return {
            "kind": request.kind,
            "broadcast": hashlib.sha256(request.blobs["broadcast"]).hexdigest(),
            "config": text_digest(self._setup.text),
            **more,
        }

    def _evaluate(
        self, federation: Federation, silo: Silo, shared: State, splits: list[str], store: StateStore
    ) -> dict[str, Any]:
        """The scores that may leave, of a broadcast's shared parts with the silo's present private ones."""
        federation.silos = {self.local.name: silo}
        federation.coordinator.shared = shared
        if splits == ["validation"]:
            found: dict[str, Any] = {"validation": scores(federation, "validation")[self.local.name]}
        else:
            found = results(federation)[self.local.name]
            keep_instances(store.path, [silo])
        return filter_scores(found, self.local.share)

    def _silo(self, federation: Federation, store: StateStore, base: str) -> Silo:
        """The silo at one of its states; the empty name is that before its first round."""
        silo = federation.silos[self.local.name]
        if "rows" not in self.local.share and not isinstance(silo, _SiloWithoutRowCount):
            silo = _SiloWithoutRowCount(silo.name, silo.train, silo.evaluations, instances=silo.instances)
            federation.silos = {self.local.name: silo}
        silo.state = None
        if base:
            kept = SiloState.from_flat(store.read(base))
            wanted = {name: tensor.shape for name, tensor in flatten(federation.context.state_of(silo).private).items()}
            if {name: tensor.shape for name, tensor in flatten(kept.private).items()} != wanted:
                raise InputError(f"silo {self.local.name!r}: its state {base!r} is of another method or tuner")
            silo.state = kept
        return silo
