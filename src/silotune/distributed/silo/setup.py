"""From the configuration that a coordinator sends to a federation of one silo: what is agreed to, loaded and kept."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from silotune.communication.privacy.budget import DELTA
from silotune.config import Config
from silotune.config.aggregation import AggregationConfig
from silotune.config.partition import PartitionConfig
from silotune.config.privacy import PrivacyConfig
from silotune.config.sampling import SamplingConfig
from silotune.data.loading import load_silos
from silotune.data.row_folder import read_rows
from silotune.data.tasks import SiloData, Splits
from silotune.distributed.protocol.agreement import check_agreed, check_federated, parse_wire_config
from silotune.distributed.protocol.handshake import HandshakeRefused, Identity, check_identity
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import InputError
from silotune.methods import Method
from silotune.methods.parts import Scope, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import BackboneRequirements, make_method, read_config
from silotune.runs.build.silos import make_silos
from silotune.training.federation import Federation


class SiloSetup:
    """Makes a silo ready for a run.

    Args:
        local: what the silo's operator wrote.
    """

    def __init__(self, local: SiloSettings) -> None:
        self.local = local
        self.text = ""
        """The configuration that it is ready for, as it travels."""
        self._backbone: tuple[BackboneRequirements, Backbone] | None = None
        self._federation: Federation | None = None
        self._agreed: Config | None = None
        if local.config is not None:
            self._agreed = read_config(local.config)

    def identity(self) -> Identity:
        """What it runs, with the shapes of the shared parts."""
        federation = self._federation
        assert federation is not None, "nothing was prepared"
        found = Identity.of(federation.config, self.text, federation.backbone)
        return replace(found, shapes=federation.coordinator.expected.shapes)

    def __call__(self, text: str, coordinators: Identity | None) -> Federation:
        """Backbone, rows and parts for a configuration; kept until another one comes.

        Args:
            text: the configuration as it travels.
            coordinators: what the coordinator runs; None before it asks.

        Raises:
            HandshakeRefused: this silo does not run the same, or did not agree to it.
            InputError: its rows or backbone cannot be used.
        """
        if self._federation is None or self.text != text:
            self._federation, self.text = None, ""
            self._federation = self._build(text, coordinators)
            self.text = text
        if coordinators is not None:
            check_identity(self.local.name, coordinators, self.identity())
        return self._federation

    def _build(self, text: str, coordinators: Identity | None) -> Federation:
        config = parse_wire_config(text)
        if self._agreed is not None:
            try:
                check_agreed(config, self._agreed)
            except InputError as error:
                raise HandshakeRefused(f"silo {self.local.name!r}: another {error}") from error
        check_federated(config)
        self._check_shared(config)
        method = make_method(config)
        self._check_sent(method)
        config = self._own(config)
        backbone = self._load(config, method)
        if coordinators is not None:  # before anything that fails for want of the right backbone
            check_identity(self.local.name, coordinators, Identity.of(config, text, backbone))
        data = self._rows(config)
        federation = build(config, backbone, [SiloData(self.local.name, data.task, Splits())])
        tokenize = method.setting.head.row_tokenizer(backbone, config.train.max_length)
        federation.silos = make_silos([data], tokenize, method)
        federation.texts = {self.local.name: len(data.splits.train[0].texts)}
        return federation

    def _check_shared(self, config: Config) -> None:
        if config.aggregation.name == "samples" and "rows" not in self.local.share:
            raise HandshakeRefused(
                f"silo {self.local.name!r}: aggregation=samples weighs silos by their rows, and this one does not say "
                "how many it has; allowed: uniform, median, trimmed-mean, krum, multi-krum"
            )
        self._check_noise(config)
        if config.start is not None and self.local.start is None:
            raise HandshakeRefused(f"silo {self.local.name!r}: the run starts from a LoRA; its silo config needs start")

    def _check_sent(self, method: Method) -> None:
        """A method says what is shared, and the coordinator which method: the operator has a say as well."""
        allowed = self.local.send
        shared = names_with(method.parts(), Scope.SHARED)
        others = [] if allowed is None else [name for name in shared if name not in allowed]
        if others:
            raise HandshakeRefused(
                f"silo {self.local.name!r}: method={method.name} shares {', '.join(others)}; its silo config lets only "
                f"{', '.join(allowed or ['nothing'])} leave (send)"
            )

    def _check_noise(self, config: Config) -> None:
        """The silo's own noise is as its operator wants it, whatever the coordinator would have."""
        local, who = self.local, f"silo {self.local.name!r}"
        if config.uplink.noise is None:
            if local.secret is not None or local.epsilon is not None:
                key = "secret" if local.secret is not None else "epsilon"
                raise HandshakeRefused(f"{who}: answers with noise alone (its silo config has {key}); uplink has none")
            return
        if local.secret is None and config.privacy.secret is not None:
            raise HandshakeRefused(f"{who}: its noise needs a secret; its silo config names none")
        if local.secret is None and not local.seeded_noise:
            raise HandshakeRefused(
                f"{who}: noise from the run's seed hides nothing from the coordinator, who knows the seed; its silo "
                "config needs secret (or seeded_noise: true, for a rehearsal)"
            )

    def _budget(self, config: Config) -> float | None:
        """The smaller of the run's and the operator's; None: neither has one."""
        budgets = [given for given in (config.privacy.epsilon, self.local.epsilon) if given is not None]
        return min(budgets, default=None)

    def _delta(self, config: Config) -> float | None:
        """The δ at which this silo counts; None: the noise has none."""
        chosen, local = config.privacy.delta or config.uplink.delta, self.local
        if local.epsilon is None or chosen is None:
            return config.privacy.delta
        return min(chosen, local.delta or DELTA)

    def _own(self, config: Config) -> Config:
        """The coordinator's configuration with this machine's paths, for a federation of this silo alone."""
        update: dict[str, Any] = {
            "backbone": self.local.backbone,
            "start": None if config.start is None else self.local.start,
            "threads": self.local.threads,
            "sampling": SamplingConfig(),
            "aggregation": AggregationConfig(name="uniform"),
            "partition": PartitionConfig(),
            "privacy": PrivacyConfig(secret=self.local.secret, epsilon=self._budget(config), delta=self._delta(config)),
            "silos": [] if self.local.data is None else [self.local.data],
        }
        return config.model_copy(update=update)

    def _load(self, config: Config, method: Method) -> Backbone:
        needs = BackboneRequirements.of(config, method)
        if self._backbone is None or self._backbone[0] != needs:
            self._backbone = None
            self._backbone = needs, needs.load()
        return self._backbone[1]

    def _rows(self, config: Config) -> SiloData:
        try:
            if self.local.rows is not None:
                return read_rows(Path(self.local.rows), self.local.name)
            return load_silos(config)[0]
        except InputError as error:  # its text may quote a cell
            print(f"silotune worker: {error}", file=sys.stderr, flush=True)
            raise InputError(f"silo {self.local.name!r}: its rows cannot be used (see the worker's log)") from None
