"""A silo's side of the protocol: each request is checked, worked on, and its answer committed before it leaves.

Torch runs here, in one thread. `Session.answer` makes every reply to a coordinator; `worker.py` answers pings, which
come from tools on the same machine.
"""

from __future__ import annotations

import hashlib
import hmac
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from silotune.communication.masks.agreement import MasksRefused
from silotune.communication.masks.fixed_point import SUMMAND
from silotune.communication.messages import with_rows
from silotune.communication.privacy.accountant import BudgetSpent
from silotune.config import Config
from silotune.core.clock import log_line
from silotune.core.determinism import key_named
from silotune.core.files import decode_text, free_bytes
from silotune.distributed.protocol.disclosure import SiloStatus, filter_metrics, filter_scores
from silotune.distributed.protocol.frames import (
    PROTOCOL,
    Frame,
    HandshakeRefused,
    ProtocolError,
    check_run_id,
    decode,
    describe_frame,
    request_of,
    require_fields,
)
from silotune.distributed.protocol.handshake import (
    Identity,
    check_identity,
    check_protocol,
    parse_wire_config,
    protocol_of,
    wire_config,
)
from silotune.distributed.silo.approvals import Approvals, WaitsForApproval, approved_part
from silotune.distributed.silo.local_work import UNSAID, LocalWork
from silotune.distributed.silo.mask_work import answer_masks, erase_secrets, pinned_list
from silotune.distributed.silo.policy import WorkRefused
from silotune.distributed.silo.run_description import (
    PlannedRun,
    Undone,
    describe,
    describe_plan,
    describe_unfit,
    plan_configuration,
    read_plan,
)
from silotune.distributed.silo.secret import derived_from_secret
from silotune.distributed.silo.setup import DoesNotFit, Prepared, SiloSetup, machine_phrase, phrase
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import Price, SiloAnswer
from silotune.distributed.silo.withdrawn_rows import RowsRefused
from silotune.errors import InputError, SilotuneError
from silotune.runs.build.resolve import read_config
from silotune.training.row_privacy import RowPlan
from silotune.version import __version__

UNDISCLOSED_ROWS = 1
"""Stands for the number of rows of a silo that does not share it."""

CHANGED_ROWS = "its rows changed within this run"


class Session:
    """Answers requests for one silo."""

    def __init__(self, settings: SiloSettings) -> None:
        self.settings = settings
        self._setup = SiloSetup(settings)
        self.store = self._setup.store
        self._approvals = Approvals(Path(settings.folder))
        self._work = LocalWork(settings, self._setup.policy, self.store)
        self._quiet = False
        """Whether reasons stay here, because the present request's run has noise on rows."""
        self._compared: tuple[str, object] | None = None
        """The last configuration and identity of a coordinator that were compared with this silo's."""
        self._last_plan: tuple[object, list[PlannedRun]] | None = None
        """The last plan that was checked, as it was sent, and what its runs came to."""
        self._run = ""

    @property
    def present(self) -> dict[str, Any]:
        """The run of the last request and its number of rounds, for tools on this machine; empty before there is one.

        Other threads may ask.
        """
        prepared = self._setup.prepared
        return {} if prepared is None else {"run": self._run, "rounds": prepared.config.rounds}

    def warm(self) -> None:
        """Load backbone and rows for the agreed configuration, before the first request."""
        if self.settings.config is not None:
            text = decode_text(Path(self.settings.config).read_bytes())
            try:
                parse_wire_config(text)
            except InputError:  # not in the form of `wire_config`: rows are read again with the first request
                text = wire_config(read_config(self.settings.config), [self.settings.name])
            self._setup.prepare(text, None)

    def answer(self, data: bytes) -> bytes:
        """Answer a request; tracebacks stay in the silo's own log.

        Everything about the reply is recorded by then. An InputError or OSError says that it cannot be, so that nothing
        may leave.
        """
        request: Frame | None = None
        self._quiet, self._work.unpaid = False, None
        try:
            with key_named():
                request = decode(data)
                answer = self._answer(request)
        except WaitsForApproval as error:
            answer = self._reason("waiting", str(error))
        except WorkRefused as error:
            answer = self._failed(str(error)) if self._quiet else self._reason("refused", str(error))
        except (HandshakeRefused, MasksRefused) as error:
            answer = self._reason("refused", str(error))
        except ProtocolError as error:
            answer = self._reason("failed", f"request: {error}")
        except SilotuneError as error:
            if isinstance(error, BudgetSpent):  # before noise was drawn
                self._work.unpaid = None
            answer = self._failed(self._without_paths(str(error)))
        except Exception as error:  # its text may quote rows
            traceback.print_exc()
            self._quiet |= self.settings.policy.preset == "private"
            reason = machine_phrase(error) or ("reasons" in self.settings.share and phrase(error))
            explanation = f": {reason}" if reason else ""
            answer = self._failed(f"{type(error).__name__}{explanation} (see the worker's log)")
        else:
            self._work.unpaid = None
        answer = self._work.unpaid or answer
        frame = self._disclosed(answer.frame)
        leaving = frame.encode()
        about = request_of(request)
        self.store.commit(str(about["run"]), answer, {**about, **describe_frame(leaving, frame), **answer.about})
        return leaving

    def _answer(self, request: Frame) -> SiloAnswer:
        if request.kind == "plan":
            return SiloAnswer(self._planned(request))
        if request.kind == "end":
            erase_secrets(self.store, *map(str, require_fields(request.fields, "run")))
            return SiloAnswer(Frame("ended", {"silo": self.settings.name}))
        run, text, identity = require_fields(request.fields, "run", "config", "identity")
        coordinators = None if (text, identity) == self._compared else self._read_identity(identity)
        self._setup.guard.begin()
        prepared = self._approved(str(run), str(text), coordinators)
        if coordinators is not None:  # shapes follow from the silo's task, so they are compared after the approval
            check_identity(self.settings.name, coordinators, prepared.identity)
            self._compared = text, identity
        changed = self._changed_rows(str(run), prepared)
        if request.kind == "hello":
            answer = SiloAnswer(self._hello(prepared, self._noise_here(str(run), prepared.recipe, prepared.row_plan)))
        elif request.kind in ("round", "final"):
            answer = self._work.train(prepared, request, changed)
        elif request.kind == "score":
            answer = self._work.score(prepared, request)
        elif request.kind == "survey":
            answer = self._work.survey(prepared, request)
        elif request.kind == "masks" and prepared.config.aggregation.secure:
            answer = answer_masks(self.settings, self.store, request, prepared.digest, prepared.shares)
        else:
            raise ProtocolError(f"unknown request {request.kind[:20]!r}")
        if "status" in self.settings.share:
            status, frame = self._status(str(run), prepared, answer), answer.frame
            answer = replace(answer, frame=replace(frame, fields=frame.fields | {"status": status.fields()}))
        return answer

    def _read_identity(self, fields: object) -> Identity:
        """Return the coordinator's identity, if it is of the same protocol and version."""
        self._compared = None
        check_protocol(self.settings.name, protocol_of(fields), PROTOCOL)
        identity = Identity.read(fields)
        if identity.version != __version__:
            silo = f"silo {self.settings.name!r}"
            raise HandshakeRefused(f"{silo}: another silotune: {__version__}, the coordinator's: {identity.version}")
        return identity

    def _approved(self, run: str, text: str, coordinators: Identity | None) -> Prepared:
        """Return the configuration as this silo runs it, once the run is approved."""
        if self._run not in ("", run):
            self._setup.prepared = None  # the rows may be others by now, or some withdrawn
        self._run = run
        try:
            prepared = self._setup.prepare(text, coordinators)
            self._quiet = prepared.noise is not None
        except DoesNotFit as error:
            self._quiet = error.is_secret
            self._require_approval(run, error.config, partial(describe_unfit, error.config, str(error.reason)))
            raise error.reason from error
        self._require_approval(run, prepared.config, lambda: self._described(run, prepared))
        if prepared.row_plan is not None:
            self._admit(run, prepared.config, prepared.recipe, prepared.row_plan)
        return prepared

    def _admit(self, run: str, config: Config, recipe: str, plan: RowPlan, reserve: bool = False) -> None:
        """Refuse a run that the budget does not allow; set the ε of an approved one aside, or if `reserve` says so.

        Where nobody approves runs, one sets its ε aside with its first answer: a greeting locks nothing up.
        """
        reserve |= self._asks_operator
        try:
            self.store.ledger.plan(run, recipe, plan, reserve, config.privacy.most_noise)
        except InputError as error:  # rows do not decide it, but how many there are
            raise HandshakeRefused(f"silo {self.settings.name!r}: {error}") from error

    def _described(self, run: str, prepared: Prepared) -> list[str]:
        plan, ledger = prepared.row_plan, self.store.ledger
        try:
            most = prepared.config.privacy.most_noise
            noise = None if plan is None else ledger.plan(run, prepared.recipe, plan, most=most)
        except InputError as error:
            return describe_unfit(prepared.config, str(error))
        return [*describe(prepared.config, prepared.federation, self.settings, noise), *prepared.remarks]

    def _require_approval(self, run: str, config: Config, described: Callable[[], list[str]]) -> None:
        check_run_id(run)
        if self._asks_operator:
            self._approvals.require(self.settings.name, run, approved_part(config), described)

    def _planned(self, request: Frame) -> Frame:
        """Say hello for every run of a plan, once all of them are checked over this silo's rows and approved."""
        plan, cells = require_fields(request.fields, "run", "cells")
        check_run_id(str(plan))
        if self._last_plan is None or self._last_plan[0] != cells:
            self._setup.guard.begin()
            self._last_plan = cells, [self._planned_run(*cell) for cell in read_plan(cells)]
        runs = self._last_plan[1]
        self._quiet = any(run.config.privacy.unit is not None for run in runs)
        self.store.require_total(
            {run.run for run in runs},
            numbers=sum(run.numbers for run in runs),
            requests=sum(run.config.rounds + 1 for run in runs),
            backbone=min((run.parameters for run in runs if run.unfit is None), default=0),
        )
        if self._asks_operator:
            configuration = plan_configuration(runs)
            described = partial(describe_plan, runs, self.settings, self.store)
            self._approvals.require(self.settings.name, str(plan), configuration, described)
        hellos = [dict(run.hello or {}) for run in runs]
        with suppress(Undone), self.store.records.transaction():  # the ε of all is set aside, or of none
            for run, hello in zip(runs, hellos, strict=True):
                if run.unfit is not None:
                    self._quiet &= isinstance(run.unfit, RowsRefused)
                    raise type(run.unfit)(f"{run.name}: {run.unfit}")
                if run.noise is not None:
                    self._admit(run.run, run.config, *run.noise, reserve=True)
                    hello |= self._noise_here(run.run, *run.noise)
            if not self._asks_operator:
                raise Undone
        return Frame("planned", {"silo": self.settings.name, "hellos": hellos})

    def _planned_run(self, name: str, run: str, text: str, identity: object) -> PlannedRun:
        """Check one run of a plan."""
        try:
            prepared = self._setup.prepare(str(text), self._read_identity(identity))
        except DoesNotFit as error:
            unfit = describe_unfit(error.config, str(error.reason))
            return PlannedRun(name, run, error.config, unfit, unfit=error.reason)
        except SilotuneError as error:
            raise type(error)(f"{name}: {error}") from error
        config, plan, parameters = prepared.config, prepared.row_plan, prepared.parameters
        numbers, hello = prepared.federation.numbers_in_all, self._hello(prepared).fields
        noise = None if plan is None else (prepared.recipe, plan)
        privacy = prepared.client.privacy
        epsilon = 0.0 if privacy is None else privacy.uses * privacy.epsilon_round
        return PlannedRun(name, run, config, self._described(run, prepared), numbers, parameters, hello, noise, epsilon)

    @property
    def _asks_operator(self) -> bool:
        """Whether the operator decides: not where the caps alone do, or the parties agreed on a configuration."""
        return self.settings.approval != "policy" and self.settings.config is None

    def _changed_rows(self, run: str, prepared: Prepared) -> str:
        """Return a note for the coordinator if the rows changed within a run; empty otherwise."""
        configuration, rows = prepared.row_use
        digests = self.store.rows_used(run, configuration)
        if digests and digests[-1] != rows and self.settings.changed_rows == "refuse":
            raise HandshakeRefused(
                f"silo {self.settings.name!r}: {CHANGED_ROWS}; its silo config has changed_rows: refuse (or accept)"
            )
        return CHANGED_ROWS if {*digests, rows} > {rows} else ""

    # -- what leaves ---------------------------------------------------------------------------------------------------

    def _hello(self, prepared: Prepared, noise: Mapping[str, float] | None = None) -> Frame:
        fields: dict[str, Any] = {
            "silo": self.settings.name,
            "identity": prepared.identity.fields(),
            "task": prepared.federation.tasks[self.settings.name].fields(),
            "texts": prepared.federation.texts[self.settings.name],
        }
        if prepared.bounded_rank is not None:
            fields["rank"] = prepared.bounded_rank
        if prepared.config.aggregation.secure:
            fields["masks"] = pinned_list(self.settings)
            fields |= {"shares": prepared.shares} if prepared.shares else {}
        return Frame("hello", {**fields, **(noise or {})})

    def _noise_here(self, run: str, recipe: str, plan: RowPlan | None) -> dict[str, float]:
        """Return a field of the hello: how many times the noise that an admitted run asks for it gets here."""
        if plan is None:
            return {}
        return {"noise": round(self.store.ledger.plan(run, recipe, plan).over(plan), 3)}

    def _disclosed(self, frame: Frame) -> Frame:
        """Remove what the operator's settings do not allow to leave; a stored answer may be older than the settings."""
        share = self.settings.share
        fields, blobs = dict(frame.fields), {name: blob for name, blob in frame.blobs.items() if name != SUMMAND}
        if "metrics" in fields:
            fields["metrics"] = filter_metrics(fields["metrics"], share)
        if "scores" in fields:
            fields["scores"] = filter_scores(fields["scores"], share)
        if "survey" in fields:
            fields["survey"] = {name: bins for name, bins in fields["survey"].items() if name in self.settings.survey}
        if "rows" not in share and blobs.get("message"):
            blobs["message"] = with_rows(blobs["message"], UNDISCLOSED_ROWS)
        return Frame(frame.kind, fields, blobs)

    def _status(self, run: str, prepared: Prepared, answer: SiloAnswer) -> SiloStatus:
        """Return the silo's status; free space has two digits, because file sizes could reveal predictions."""
        folder, privacy, budget = Path(self.settings.folder), prepared.client.privacy, self.settings.budget
        spent = self.store.spent(run, None if privacy is None else Price.of(privacy))
        uses = spent.uses + (answer.price is not None)
        epsilon = spent.epsilon + (privacy.account.total(uses) if privacy is not None and uses else 0.0)
        if prepared.row_plan is not None and self.settings.privacy is not None:  # of the unit, not of the silo
            budget = self.settings.privacy.epsilon
            epsilon = self.store.ledger.spent(prepared.row_plan.unit, answer.charge) or 0.0
        key = derived_from_secret(folder, "status")  # without it nobody can try rows against the fingerprint
        free, noised = free_bytes(folder), prepared.noise is not None
        fingerprint = hmac.new(key, prepared.rows.encode(), hashlib.sha256).hexdigest()[:32]
        return SiloStatus(
            rows_fingerprint=None if noised else fingerprint,  # equal fingerprints would mean equal rows
            epsilon_left=None if budget is None else max(0.0, budget - epsilon),
            disk_free_bytes=None if free is None or noised else int(float(f"{free:.1e}")),
        )

    def _reason(self, kind: str, reason: str) -> SiloAnswer:
        log_line(f"silotune worker {self.settings.name!r}: {kind}: {reason}")
        return SiloAnswer(Frame(kind, {"silo": self.settings.name, "reason": reason}))

    def _failed(self, reason: str) -> SiloAnswer:
        """Return a failure; where rows have noise its reason stays here, because it may follow from them."""
        if not self._quiet:
            return self._reason("failed", reason)
        log_line(f"silotune worker {self.settings.name!r}: failed: {reason}")
        return SiloAnswer(Frame("failed", {"silo": self.settings.name, "reason": UNSAID}))

    def _without_paths(self, reason: str) -> str:
        """Remove local paths from error messages before they leave the silo."""
        settings = self.settings
        own = (settings.folder, settings.rows, settings.backbone.name, settings.start, settings.secret, settings.config)
        data = None if settings.data is None else settings.data.path
        for path in sorted({path for path in (*own, data) if path and "/" in path}, key=len, reverse=True):
            reason = reason.replace(path, f"…/{Path(path).name}")
        return reason
