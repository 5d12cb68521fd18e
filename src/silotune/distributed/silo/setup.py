"""Builds this silo's federation from a coordinator's configuration: checked, with backbone and rows, and cached."""

from __future__ import annotations

import errno
import hashlib
import json
import sqlite3
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from silotune.config import Config
from silotune.core.clock import log_line
from silotune.core.determinism import set_numerics
from silotune.core.randomness import derive
from silotune.core.tensors import State, flatten
from silotune.data.loading import load_silos
from silotune.data.row_folder import read_rows
from silotune.data.rows import SiloData, Splits
from silotune.data.tasks import UndeclaredLabels
from silotune.distributed.protocol.frames import HandshakeRefused
from silotune.distributed.protocol.handshake import (
    Identity,
    check_agreed,
    check_federated,
    check_identity,
    parse_wire_config,
    recipe_digest,
    text_digest,
)
from silotune.distributed.silo.local_config import allowed_figures, check_sent, check_settings, local_config, run_before
from silotune.distributed.silo.policy import Policy, WorkGuard, backbone_parameters
from silotune.distributed.silo.secret import derived_from_secret
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import SiloStore
from silotune.distributed.silo.survey import RowCounts, count_rows
from silotune.distributed.silo.withdrawn_rows import Marks, RowsRefused, remarks, scored_again, without_withdrawn
from silotune.errors import InputError, SilotuneError
from silotune.evaluation.untouched import without_training
from silotune.methods import Method
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads import Head
from silotune.runs.build.builder import cut_lines
from silotune.runs.build.coordinator import build_coordinator
from silotune.runs.build.model import BackboneRequirements, build_model
from silotune.runs.build.plan_row_noise import plan_row_noise
from silotune.runs.build.resolve import for_silo, make_method, read_config, resolve
from silotune.runs.build.silos import build_silos
from silotune.runs.build.validation import check_tasks
from silotune.training.client import SiloClient
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.phase_batches import check_rows
from silotune.training.row_privacy import RowPlan, RowPrivacy
from silotune.training.silo import Silo

LONGEST_CONFIGURATION = 2**18
"""Characters of a configuration; those that wait for approval are kept, and a person reads them."""


class DoesNotFit(InputError):
    """A run that cannot take place over this silo's rows; its operator reads why before the coordinator does.

    Args:
        reason: the reason that the coordinator gets once the run is approved.
    """

    def __init__(self, config: Config, reason: SilotuneError) -> None:
        super().__init__(str(reason))
        self.config = config
        self.reason = reason
        self.is_secret = config.privacy.unit is not None and isinstance(reason, RowsRefused)
        """Whether the reason stays here even if the run is approved: rows have noise, and it may follow from them."""


@dataclass
class Prepared:
    """A run's configuration as this silo carries it out, prepared once for all requests of the run.

    Args:
        federation: of this silo alone; its shared parts have shapes and no data.
        identity: the silo's, with the shapes of the shared parts.
        rows: the sha256 of the rows as the configuration splits them.
        private_shapes: shapes of the parts that stay here.
        bounded_rank: the rank of the adapters, where the operator bounds it below the run's; else None.
        noise: on rows, as the run's own target asks for; None without.
        marks: digests of the rows (`withdrawn_rows.py`).
        counts: what a survey may learn of the rows; None in a run that is no survey.
        before: the id of the run with whose parts this one begins; empty if there is none.
        beginning: notes for the coordinator on how the run begins here: without a model of that run, or with scores of
            rows that trained it.
        remarks: lines about the rows for the operator.
    """

    text: str
    config: Config
    federation: Federation
    client: SiloClient
    identity: Identity
    rows: str
    parameters: int
    private_shapes: Mapping[str, tuple[int, ...]]
    bounded_rank: int | None
    noise: RowPrivacy | None
    marks: Marks
    counts: RowCounts | None
    before: str
    beginning: list[str]
    remarks: list[str]

    @property
    def row_plan(self) -> RowPlan | None:
        """The plan of noise on rows that meets the run's own target."""
        return None if self.noise is None else next(iter(self.noise.plans.values()))

    @property
    def shares(self) -> str:
        """The noise that silos add together, as agreements have it; empty where each adds its own."""
        return "" if self.noise is None or self.noise.shares is None else self.noise.shares.text

    @property
    def keeps_numbers(self) -> bool:
        """Whether losses, scores and counts stay here, because only what has noise or masks may leave."""
        return self.noise is not None or self.config.aggregation.secure

    @cached_property
    def digest(self) -> str:
        """The sha256 of the configuration as it was sent."""
        return text_digest(self.text)

    @cached_property
    def recipe(self) -> str:
        """The sha256 of the configuration without its section `federation`, which may change within a run."""
        return recipe_digest(self.config)

    @property
    def row_use(self) -> tuple[str, str]:
        """`recipe`, and the digest of the rows."""
        return self.recipe, self.rows


class SiloSetup:
    """Builds and caches backbone, rows and parts for the coordinator's configuration."""

    def __init__(self, settings: SiloSettings) -> None:
        self.settings = settings
        self.prepared: Prepared | None = None
        """For the configuration that was sent last."""
        self._backbone: tuple[BackboneRequirements, Backbone] | None = None
        self.policy = Policy(settings.name, settings.policy)
        self.store = SiloStore(Path(settings.folder), self.policy, settings.privacy)
        self.guard = WorkGuard(self.policy)
        self._agreed = None if settings.config is None else read_config(settings.config)

    def prepare(self, text: str, coordinator_identity: Identity | None) -> Prepared:
        """Return the configuration as this silo runs it; an identity that was compared before is None."""
        prepared = self.prepared
        if prepared is None or prepared.text != text:
            self.prepared = None
            self.prepared = prepared = self._build(text, coordinator_identity)
        if coordinator_identity is not None:
            check_identity(self.settings.name, replace(coordinator_identity, shapes=None), prepared.identity)
        return prepared

    def _build(self, text: str, coordinator_identity: Identity | None) -> Prepared:
        if len(text) > LONGEST_CONFIGURATION:
            raise HandshakeRefused(f"silo {self.settings.name!r}: a configuration of {len(text):,} characters")
        proposal = parse_wire_config(text)
        if self._agreed is not None:
            try:
                check_agreed(proposal, self._agreed)
            except InputError as error:
                raise HandshakeRefused(f"silo {self.settings.name!r}: another {error}") from error
        check_federated(proposal)
        check_settings(self.settings, proposal)
        check_sent(self.settings, make_method(proposal))
        name, secret = self.settings.name, self.settings.policy.row_order == "secret"
        split_seed = derive(self._secret_seed(""), "split", proposal.data_seed) if secret else None
        config, bounded = for_silo(local_config(self.settings, proposal, split_seed), name, self.settings.rank)
        config, method = resolve(config)
        set_numerics(config.precision.deterministic, config.precision.tf32)
        backbone = self._load(config, method, coordinator_identity)
        if coordinator_identity is not None:  # first, as another backbone makes later steps fail
            check_identity(self.settings.name, coordinator_identity, Identity.of(backbone))
        try:
            data, marks, left_out = without_withdrawn(self.store.records, self._rows(config))
            federation, private = self._assemble(config, method, backbone, data)
        except HandshakeRefused:
            raise
        except SilotuneError as error:
            raise DoesNotFit(proposal, error) from error
        parameters = backbone_parameters(backbone)
        self.policy.check_run(federation, parameters)
        try:
            self.policy.check_work(federation, None if self.settings.privacy is None else self.settings.privacy.delta)
        except SilotuneError as error:
            raise DoesNotFit(proposal, error) from error
        federation.context.guard = self.guard
        if secret:
            recipe = proposal.model_dump_json(exclude={"description", "federation"})
            federation.context.draw_seed = self._secret_seed(recipe)
        before = run_before(proposal) or ""
        if before and flatten(private) and proposal.aggregation.secure:  # no agreement says what they were made from
            raise HandshakeRefused(
                f"silo {name!r}: start: under aggregation.secure private parts begin anew, and not from run {before}; "
                "allowed: no start, or a method without private parts (head.scope=shared)"
            )
        beginning = []
        if proposal.start is None:
            without_training(federation)
        if proposal.work != "training":
            marks = {mark: split for mark, split in marks.items() if split != "train"}  # no row trains anything
            if before and config.start is None and flatten(private):
                raise HandshakeRefused(f"silo {name!r}: start: has no model of run {before} that rounds=0 could score")
        if before and config.start is None:
            beginning.append(f"has no model of run {before}: its private parts begin untrained")
        lines = [*remarks(self.store.records, marks, left_out, before), *beginning]
        if {"validation", "test"} & {*self.settings.share} and scored_again(self.store.records, marks, before):
            beginning.append(f"scores rows that trained run {before}")
        if left_out:
            log_line(f"silotune worker {name!r}: {lines[0]}")
        figures = allowed_figures(self.settings, proposal)
        counts = count_rows(config, federation.context, data, figures) if figures else None
        identity = replace(Identity.of(backbone), shapes=federation.coordinator.expected.shapes)
        return Prepared(
            text,
            proposal,
            federation,
            federation.client(measures=True),
            identity,
            rows_digest(data.splits),
            parameters,
            {part: tuple(tensor.shape) for part, tensor in flatten(private).items()},
            bounded,
            federation.context.row_privacy,
            marks,
            counts,
            before,
            beginning,
            lines,
        )

    def _assemble(self, config: Config, method: Method, backbone: Backbone, data: SiloData) -> tuple[Federation, State]:
        """Build the silo's side of the federation, this silo alone, and its private parts; parts have no data."""
        tasks, texts = {data.name: data.task}, {data.name: len(data.splits.train[0].texts)}
        check_tasks(config, method, tasks)
        context = build_model(config, method, tasks.values(), backbone)
        needed = config.privacy.unit is not None or config.audit.canaries > 0
        secret = derived_from_secret(Path(self.settings.folder), "rows") if needed else None
        try:
            if config.head.writes and config.privacy.unit is None:  # with noise, no refusal may depend on rows
                cut_lines(config, [data], context)
            silos, _ = build_silos(config, context, [data], secret=secret)
            check_rows(context, silos.values(), config.privacy.unit is not None)
        except InputError as error:  # it may say which row, or how long one is
            raise self._rows_refused(error, "they do not suit the run's head or limits") from error
        (silo,) = silos.values()
        shared, private = planned_parts(context, silo)
        coordinator, privacy = build_coordinator(config, context, silos, tasks, labeled=False, shared=shared)
        if config.privacy.unit is not None:
            name = silo.name
            try:
                context.row_privacy, privacy = plan_row_noise(config, context, silos, lambda _: [name], secret)
            except InputError as error:  # of the method and not of rows, so the coordinator may read it
                raise HandshakeRefused(f"silo {name!r}: {error}") from error
        return Federation(config, context, silos, coordinator, tasks, texts, privacy=privacy), private

    def _secret_seed(self, purpose: str) -> int:
        return int.from_bytes(derived_from_secret(Path(self.settings.folder), f"draws {purpose}"), "big")

    def _load(self, config: Config, method: Method, coordinator_identity: Identity | None) -> Backbone:
        """Load the backbone; that it is another than the coordinator's is said before what the head needs of it."""
        needs = BackboneRequirements.of(config, method)
        if self._backbone is None or self._backbone[0] != needs:
            self._backbone = None
            try:
                self._backbone = needs, needs.load()
            except InputError:
                if coordinator_identity is not None and needs.model_class != Head.model_class:
                    plain = replace(needs, model_class=Head.model_class).load()
                    check_identity(self.settings.name, replace(coordinator_identity, shapes=None), Identity.of(plain))
                raise
        return self._backbone[1]

    def _rows(self, config: Config) -> SiloData:
        try:
            if self.settings.rows is not None:
                return read_rows(Path(self.settings.rows), self.settings.name, config.privacy.unit is not None)
            return load_silos(config)[0]
        except UndeclaredLabels:
            raise
        except InputError as error:  # its text may quote a cell
            raise self._rows_refused(error, "the file is missing, or not as the silo config says") from None

    def _rows_refused(self, error: InputError, unfit: str) -> InputError:
        """Log an error about rows, and return what the coordinator may read of it."""
        log_line(f"silotune worker: {error}")
        machine = machine_phrase(error)
        reason = machine or ("reasons" in self.settings.share and phrase(error, unfit))
        kind = InputError if machine else RowsRefused
        explanation = f": {reason}" if reason else ""
        return kind(f"silo {self.settings.name!r}: its rows cannot be used{explanation} (see the worker's log)")


def planned_parts(context: TrainingContext, silo: Silo) -> tuple[State, State]:
    """Return a run's shared and private parts as tensors without data, to judge them before they are allocated."""
    tasks = [rows.task for rows in silo.train.values()]
    try:
        initial = copy(context.initial)
        initial.start = None  # trained parts have the shapes of drawn ones
        with FakeTensorMode(allow_non_fake_inputs=True):
            private = initial.private(silo.name, tasks)
            return initial.at_rank(initial.shared([silo]), silo.name), private
    except RuntimeError as error:  # what fake tensors cannot do: read a number, hand data to NumPy
        names = ", ".join(sorted({part.module.name for part in context.parts.values()}))
        raise InputError(
            f"method={context.method.name}: the size of its parts ({names}) is not known before they are made: "
            f"their initial values depend on data ({type(error).__name__})"
        ) from error


def rows_digest(splits: Splits) -> str:
    """Return the sha256 of all rows, in order, by split."""
    digest = hashlib.sha256()
    for name in ("train", "validation", "test"):
        for row in getattr(splits, name):
            digest.update(json.dumps([name, asdict(row)]).encode())
    return digest.hexdigest()


_Phrases = tuple[tuple[type[BaseException], str], ...]

_OF_MACHINES: _Phrases = (
    (FileNotFoundError, "a file is missing"),
    (PermissionError, "a file may not be opened"),
)
"""Errors whose cause is the machine, and never what is in the rows."""

_PHRASES: _Phrases = (
    *_OF_MACHINES,
    (UnicodeError, "a file is not in the encoding that it should have"),
    (MemoryError, "not enough memory"),
    (torch.OutOfMemoryError, "not enough memory of the device"),
    (sqlite3.Error, "the records cannot be read or written"),
    (OSError, "a file cannot be read or written"),
)


def machine_phrase(error: BaseException) -> str:
    """Return the phrase for an error of this machine, which any coordinator may read; empty for other errors."""
    return phrase(error, "", _OF_MACHINES)


def phrase(error: BaseException, otherwise: str = "something else", phrases: _Phrases = _PHRASES) -> str:
    """Return one of a few phrases for an error or its cause; the error's own text may quote a row and stays here."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no space is left on the disk"
        for kind, words in phrases:
            if isinstance(cause, kind):
                return words
        cause = cause.__cause__
    return otherwise
