"""`SiloSetup` checks a coordinator's configuration; builds and keeps backbone, rows and `Federation`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from silotune.config import Config
from silotune.core.clock import log_line
from silotune.core.determinism import set_numerics
from silotune.core.tensors import State
from silotune.data.loading import load_silos
from silotune.data.row_folder import read_rows
from silotune.data.rows import SiloData
from silotune.distributed.protocol.agreement import check_agreed, check_federated, parse_wire_config
from silotune.distributed.protocol.handshake import HandshakeRefused, Identity, check_identity
from silotune.distributed.silo.exposure import RowUse
from silotune.distributed.silo.limits import RequestLimits, WorkGuard
from silotune.distributed.silo.local_config import check_sent, check_settings, local_config
from silotune.distributed.silo.own_keys import ORDER_KEY, own_key
from silotune.distributed.silo.planned_parts import PlannedParts
from silotune.distributed.silo.policy import Policy
from silotune.distributed.silo.request_ledger import RequestLedger
from silotune.distributed.silo.row_fingerprint import rows_digest
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.unfit_run import UnfitRun
from silotune.errors import InputError, SilotuneError
from silotune.methods import Method
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.coordinator import build_coordinator
from silotune.runs.build.model import BackboneRequirements, build_model
from silotune.runs.build.ranks import for_silo, rank_of
from silotune.runs.build.resolve import make_method, read_config, use_this_machine
from silotune.runs.build.silos import build_silos
from silotune.runs.build.validation import check_tasks
from silotune.training.federation import Federation
from silotune.training.phase_batches import check_rows
from silotune.training.row_draws import RowDraws
from silotune.training.silo import Silo

LONGEST_CONFIGURATION = 2**18
"""Characters of a configuration; those that wait for approval are kept, and a person reads them."""

UNDISCLOSED_ROWS = 1
"""Stands for the number of rows of a silo that does not share it."""


class SiloWithoutRowCount(Silo):
    """A silo that does not share its number of rows."""

    @property
    def rows(self) -> int:
        """Stands for the number of rows."""
        return UNDISCLOSED_ROWS


class SiloSetup:
    """Builds and caches backbone, rows and parts for the coordinator's configuration.

    Args:
        settings: the operator's settings.
    """

    def __init__(self, settings: SiloSettings) -> None:
        self.settings = settings
        self.text = ""
        """The configuration it was built for, as it was sent."""
        self._backbone: tuple[BackboneRequirements, Backbone] | None = None
        self._federation: Federation | None = None
        self._config: Config | None = None
        self.start: State = {}
        """The shared parts with which the run starts; empty before `allocate`."""
        self.rows_digest = ""
        """The sha256 of the rows as the configuration splits them."""
        self.bounded_rank: int | None = None
        """The rank of the adapters, where the operator bounds it below the run's; else None."""
        self._row_use: RowUse | None = None
        self.policy = Policy(settings.name, settings.policy, tuple(settings.share))
        self.limits = RequestLimits(self.policy, RequestLedger(Path(settings.folder)))
        self.guard = WorkGuard(self.policy)
        self._agreed: Config | None = None
        if settings.config is not None:
            self._agreed = read_config(settings.config)

    @property
    def row_use(self) -> RowUse:
        """What the run does with the rows."""
        assert self._row_use is not None, "nothing was built"
        return self._row_use

    @property
    def config(self) -> Config:
        """The configuration of the federation that was built last, as it was sent."""
        assert self._config is not None, "nothing was built"
        return self._config

    @property
    def federation(self) -> Federation:
        """The federation that was built last."""
        assert self._federation is not None, "nothing was built"
        return self._federation

    def identity(self) -> Identity:
        """Return this silo's identity, with the shapes of the shared parts."""
        federation = self.federation
        identity = Identity.of(federation.config, self.text, federation.backbone)
        return replace(identity, shapes=federation.coordinator.expected.shapes)

    def federation_for(self, text: str, coordinator_identity: Identity | None) -> Federation:
        """Build the federation for a configuration; cached until the configuration changes.

        Args:
            text: the configuration as it was sent.
            coordinator_identity: the coordinator's identity; None before its first request.

        Returns:
            A federation of this silo alone; its shared parts have shapes and no data before `allocate`.

        Raises:
            HandshakeRefused: the identities differ, or the operator's settings exclude the configuration.
            UnfitRun: rows cannot be used, or not for this configuration.
        """
        if self._federation is None or self.text != text:
            self._federation, self.text = None, ""
            self._federation = self._build(text, coordinator_identity)
            self.text = text
        if coordinator_identity is not None:
            check_identity(self.settings.name, replace(coordinator_identity, shapes=None), self.identity())
        return self._federation

    def check_shapes(self, coordinator_identity: Identity) -> None:
        """Compare the shapes of the shared parts, which follow from the silo's task.

        Raises:
            HandshakeRefused: they differ.
        """
        check_identity(self.settings.name, coordinator_identity, self.identity())

    def _build(self, text: str, coordinator_identity: Identity | None) -> Federation:
        if len(text) > LONGEST_CONFIGURATION:
            raise HandshakeRefused(f"silo {self.settings.name!r}: a configuration of {len(text):,} characters")
        config = parse_wire_config(text)
        if self._agreed is not None:
            try:
                check_agreed(config, self._agreed)
            except InputError as error:
                raise HandshakeRefused(f"silo {self.settings.name!r}: another {error}") from error
        check_federated(config)
        self.policy.check_configuration(config)
        check_settings(self.settings, config)
        method = make_method(config)
        check_sent(self.settings, method)
        name, bound = self.settings.name, self.settings.rank
        rank = rank_of(method, name, bound)
        self.bounded_rank = None if rank == rank_of(method, name) else rank
        config = for_silo(local_config(self.settings, config, self._split_seed(config)), method, name, bound)
        method = make_method(config)
        set_numerics(config.precision.deterministic, config.precision.tf32)
        backbone = self._load(config, method)
        if coordinator_identity is not None:  # first, as another backbone makes later steps fail
            check_identity(self.settings.name, coordinator_identity, Identity.of(config, text, backbone))
        self._config = sent = parse_wire_config(text)
        self.start = {}
        try:
            data = self._rows(config)
            federation, parts = self._assemble(config, method, backbone, data)
            self.rows_digest = rows_digest(data.splits)
            self.policy.check_federation(federation, parts.private_numbers)
            (silo,) = federation.silos.values()
            self._row_use = RowUse.of(data.splits, federation.context, silo)
            self.limits.check_use(self._row_use)
        except SilotuneError as error:
            raise UnfitRun(self.settings.name, sent, error) from error
        federation.context.guard = self.guard
        if self.settings.policy.row_order == "secret":
            recipe = sent.model_dump_json(exclude={"description", "federation"})
            federation.context.row_draws = RowDraws.secret(self._order_key, recipe)
        return federation

    def allocate(self) -> None:
        """Make the shared parts with which the run starts: after policy and operator, who judged their shapes."""
        federation = self.federation
        if not self.start:
            context, silos = federation.context, federation.silos.values()
            self.start = context.initial.at_rank(context.initial.shared(silos), self.settings.name)
            federation.coordinator.adopt(self.start)

    def _assemble(
        self, config: Config, method: Method, backbone: Backbone, data: SiloData
    ) -> tuple[Federation, PlannedParts]:
        """Build the silo's side of the federation: this silo alone, its parts as shapes without data."""
        config = use_this_machine(config)
        tasks, texts = {data.name: data.task}, {data.name: len(data.splits.train[0].texts)}
        check_tasks(config, method, tasks)
        context = build_model(config, method, tasks.values(), backbone)
        self.policy.check_at_once(context)
        silos, _ = build_silos(config, context, [data])
        check_rows(context, silos.values())
        if "rows" not in self.settings.share:
            silos = {name: SiloWithoutRowCount(name, silo.train, silo.evaluations) for name, silo in silos.items()}
        (silo,) = silos.values()
        parts = PlannedParts.of(context, silo)
        coordinator, privacy = build_coordinator(config, context, silos, tasks, labeled=False, shared=parts.shared)
        return Federation(config, context, silos, coordinator, tasks, texts, privacy=privacy), parts

    def _split_seed(self, config: Config) -> int | None:
        """Return the seed with which rows are split, where the operator keeps their order secret; else None."""
        if self.settings.policy.row_order != "secret":
            return None
        return RowDraws.secret(self._order_key, "").split_seed(config.data_seed)

    @property
    def _order_key(self) -> bytes:
        return own_key(Path(self.settings.folder), ORDER_KEY)

    def _load(self, config: Config, method: Method) -> Backbone:
        needs = BackboneRequirements.of(config, method)
        if self._backbone is None or self._backbone[0] != needs:
            self._backbone = None
            self._backbone = needs, needs.load()
        return self._backbone[1]

    def _rows(self, config: Config) -> SiloData:
        try:
            if self.settings.rows is not None:
                return read_rows(Path(self.settings.rows), self.settings.name)
            return load_silos(config)[0]
        except InputError as error:  # its text may quote a cell
            log_line(f"silotune worker: {error}")
            raise InputError(f"silo {self.settings.name!r}: its rows cannot be used (see the worker's log)") from None
