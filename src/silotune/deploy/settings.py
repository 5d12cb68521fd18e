"""Reads the file of a coordinator, of a silo, or of a silo's node that runs apart from its worker.

The keys of a file tell which of the three it is.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.trees import load_tree
from silotune.config.validators import Address, ConfigPath, Name
from silotune.distributed.silo.silo_config import SiloSettings, read_settings, read_silo_settings
from silotune.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost")

_SILO_KEYS = {"data", "rows", "share"}
"""Keys that only a silo's file has."""


class CoordinatorSettings(Section):
    """The coordinator's settings.

    Args:
        folder: the folder for the SuperLink's state and logs.
        host: address of the SuperLink, on loopback only: access to more than `/v1/fleet/` and `/health` allows running
            code on the silos, so a proxy passes only these two on.
        ca: certificate authority. With TLS, nodes must be registered by their keys.
        public_address: HOST:PORT of the proxy, at which silos reach this coordinator; invitations name it.
        enrollment_port: the port on 127.0.0.1 at which invited silos register their keys, behind the proxy; None:
            keys are registered by `silotune federation admit` alone.
        metrics_port: a port on 127.0.0.1 where `up` serves metrics for Prometheus (`/metrics`); None serves none.
    """

    folder: ConfigPath = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    ca: ConfigPath | None = Field(default=None, min_length=1)
    certificate: ConfigPath | None = Field(default=None, min_length=1)
    key: ConfigPath | None = Field(default=None, min_length=1)
    insecure: bool = False
    public_address: Address | None = None
    enrollment_port: int | None = Field(default=None, ge=1, le=65535)
    metrics_port: int | None = Field(default=None, ge=1, le=65535)

    @field_validator("host")
    @classmethod
    def _on_loopback(cls, host: str) -> str:
        if host not in LOOPBACK:
            raise ValueError(
                f"{host!r} is refused: who reaches the SuperLink can run code on the silos; allowed: "
                f"{', '.join(LOOPBACK)}, with a proxy before it (docs/deployment.md)"
            )
        return host

    @model_validator(mode="after")
    def _fitting(self) -> CoordinatorSettings:
        files = (self.ca, self.certificate, self.key)
        if self.insecure and any(files):
            raise ValueError("insecure: excludes ca, certificate and key")
        if not self.insecure and not all(files):
            raise ValueError("give ca, certificate and key (or insecure: true, for one machine)")
        if self.insecure and self.enrollment_port is not None:
            raise ValueError("insecure: excludes enrollment_port: without TLS there are no keys")
        if self.enrollment_port == self.port:
            raise ValueError(f"enrollment_port: {self.port} is the SuperLink's port")
        return self

    @property
    def address(self) -> str:
        """HOST:PORT of the SuperLink."""
        return f"{self.host}:{self.port}"


class NodeSettings(Section):
    """The settings of a silo's SuperNode whose worker runs as another user or in another container.

    Flower runs the coordinator's apps as this process's user, who has no access to the silo's data.

    Args:
        superlink: as in `SiloSettings`; so are `root_certificates`, `private_key`, `insecure` and `port`.
        metrics_port: a port on 127.0.0.1 where `federation join` serves the link's metrics; None serves none.
    """

    name: Name
    folder: ConfigPath = Field(min_length=1)
    socket: ConfigPath = Field(min_length=1)
    superlink: Address
    root_certificates: ConfigPath | None = Field(default=None, min_length=1)
    private_key: ConfigPath | None = Field(default=None, min_length=1)
    insecure: bool = False
    port: int = Field(default=9094, ge=1, le=65535)
    metrics_port: int | None = Field(default=None, ge=1, le=65535)

    @property
    def socket_path(self) -> Path:
        """Path of the worker's socket."""
        return Path(self.socket)


def read_coordinator_settings(path: Path) -> CoordinatorSettings:
    """Read a coordinator's settings."""
    return read_settings(path, CoordinatorSettings, "coordinator")


def read_silo_or_node_settings(path: Path) -> SiloSettings | NodeSettings:
    """Read a silo's settings, or its node's, with which it can connect."""
    config: SiloSettings | NodeSettings
    if _SILO_KEYS & load_tree(path).keys():
        where, config = f"silo config {path}", read_silo_settings(path)
    else:
        where, config = f"node config {path}", read_settings(path, NodeSettings, "node")
    keys = (config.root_certificates, config.private_key)
    if config.superlink is None:
        raise InputError(f"{where}: superlink: give the address HOST:PORT")
    if config.insecure and config.superlink.rpartition(":")[0] not in LOOPBACK:
        raise InputError(f"{where}: insecure: for one machine only; superlink is {config.superlink}")
    if config.insecure and any(keys):
        raise InputError(f"{where}: insecure: excludes root_certificates and private_key")
    if not config.insecure and not all(keys):
        raise InputError(f"{where}: give root_certificates and private_key (or insecure: true, for one machine)")
    return config


def read_party(path: Path) -> CoordinatorSettings | SiloSettings | NodeSettings:
    """Read any party's settings: with a name a silo's or its node's, else the coordinator's."""
    return read_silo_or_node_settings(path) if "name" in load_tree(path) else read_coordinator_settings(path)
