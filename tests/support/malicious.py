"""A malicious coordinator with protocol and source at hand: sends one silo whatever frame it likes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml

from silotune.communication.messages import broadcast_message
from silotune.config import Config
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.protocol.handshake import Identity, wire_config
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.runs.build.builder import build
from silotune.training.federation import Federation

RUN = "0" * 16

CAPS = {
    "preset": "trusting",
    "numbers_per_round": "3%",
    "numbers_in_all": "1000%",
    "train_rows": 50,
    "train_steps": 4,
    "seconds": 3600,
    "memory_mib": 16_384,
    "rounds": 200,
    "requests_in_all": 5000,
}
"""A policy with narrow caps."""

ALLOWED = ("fedmcp", "tuner.r=1", "train.epochs=1", "train.batches=even", "rounds=3")
"""Words of a run that `CAPS` allow on the tiny backbone, whose adapters are large beside it."""


@lru_cache(maxsize=4)
def _built(config: str) -> Federation:
    return build(Config.model_validate_json(config))


@dataclass
class Malicious:
    """A coordinator that is free to change its frames; `settings` are the silo's, which it cannot change."""

    settings: SiloSettings
    config: Config
    run: str = RUN
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys that are put into the configuration that is sent, after every check of an honest coordinator."""

    def __post_init__(self) -> None:
        self.federation = _built(self.config.model_dump_json())
        self.session = Session(self.settings)
        self.configure(**self.changes)

    def configure(self, **changes: Any) -> None:
        tree = yaml.safe_load(wire_config(self.config, sorted(self.federation.silos)))
        for key, value in changes.items():
            *groups, last = key.split("__")
            group = tree
            for name in groups:
                group = group[name]
            group[last] = value
        self.text = yaml.safe_dump(tree, sort_keys=False)
        self.identity = Identity.of(self.federation.backbone)

    def restart(self) -> None:
        self.session = Session(self.settings)

    def broadcast(self, number: int = 1, add: float = 0.0, scale: float = 1.0) -> bytes:
        """Return a broadcast of the start, moved and scaled."""
        shared = {
            name: {key: tensor * scale + add for key, tensor in tensors.items()}
            for name, tensors in self.federation.coordinator.shared.items()
        }
        return broadcast_message(shared, number)

    def ask(self, kind: str, number: int = 1, **fields: Any) -> Frame:
        """Send a request and return the silo's reply; `broadcast=` replaces the broadcast."""
        blob = fields.pop("broadcast", None) or self.broadcast(number if 0 <= number < 2**31 else 1)
        header = {"run": self.run, "config": self.text, "identity": self.identity.fields()}
        if kind != "hello":
            header |= {"round": number, "base": "", "keep": [], "judge": False, "splits": ["validation"]}
        return decode(self.session.answer(Frame(kind, header | fields, {"broadcast": blob}).encode()))

    def reason(self, kind: str = "round", number: int = 1, **fields: Any) -> str:
        """Return the reason with which the silo refuses a request; empty if it answers."""
        reply = self.ask(kind, number, **fields)
        return str(reply.fields.get("reason", ""))
