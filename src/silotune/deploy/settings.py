"""Reads the file of a coordinator, of a silo, or of a silo's node that runs apart from its worker.

The keys of a file tell which of the three it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from silotune.config.paths import resolve
from silotune.config.section import Section, input_error
from silotune.config.trees import load_tree
from silotune.config.validators import Address, Name, is_address
from silotune.distributed.silo.silo_config import SiloSettings, read_silo_settings
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
        port: the SuperLink's port.
        ca: certificate authority. With TLS, nodes must be registered by their keys.
        certificate: the file of the coordinator's certificate.
        key: the file of the certificate's key.
        insecure: no TLS and no keys; on one machine only.
        public_address: HOST:PORT of the proxy, at which silos reach this coordinator; invitations name it.
        enrollment_port: the port on 127.0.0.1 at which invited silos register their keys, behind the proxy; None:
            keys are registered by `silotune federation admit` alone.
        metrics_port: a port on 127.0.0.1 where `up` serves metrics for Prometheus (`/metrics`); None serves none.
    """

    folder: str = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    ca: str | None = Field(None, min_length=1)
    certificate: str | None = Field(None, min_length=1)
    key: str | None = Field(None, min_length=1)
    insecure: bool = False
    public_address: Address | None = None
    enrollment_port: int | None = Field(None, ge=1, le=65535)
    metrics_port: int | None = Field(None, ge=1, le=65535)

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
        name: the silo's.
        folder: the folder for logs.
        socket: path of the worker's socket.
        superlink: as in `SiloSettings`; so are `root_certificates`, `private_key`, `insecure` and `port`.
        metrics_port: a port on 127.0.0.1 where `federation join` serves the link's metrics; None serves none.
    """

    name: Name
    folder: str = Field(min_length=1)
    socket: str = Field(min_length=1)
    superlink: str = Field(min_length=1)
    root_certificates: str | None = Field(None, min_length=1)
    private_key: str | None = Field(None, min_length=1)
    insecure: bool = False
    port: int = Field(9094, ge=1, le=65535)
    metrics_port: int | None = Field(None, ge=1, le=65535)

    @property
    def socket_path(self) -> Path:
        """Path of the worker's socket."""
        return Path(self.socket)


Party = CoordinatorSettings | SiloSettings | NodeSettings


def read_coordinator_settings(path: Path) -> CoordinatorSettings:
    """Read a coordinator's settings; paths are relative to the file."""
    tree = _read(path, ("folder", "ca", "certificate", "key"))
    return _validated(CoordinatorSettings, tree, f"coordinator config {path}")


def read_silo_or_node_settings(path: Path) -> SiloSettings | NodeSettings:
    """Read a silo's settings, or its node's; paths are relative to the file."""
    tree = _read(path, ("folder", "socket", "root_certificates", "private_key"))
    if _SILO_KEYS & tree.keys():
        config: SiloSettings | NodeSettings = read_silo_settings(path)
    else:
        config = _validated(NodeSettings, tree, f"node config {path}")
    _check_connection(path, config)
    return config


def read_party(path: Path) -> Party:
    """Read any party's settings: with a name a silo's or its node's, else the coordinator's."""
    return read_silo_or_node_settings(path) if "name" in _read(path, ()) else read_coordinator_settings(path)


_S = TypeVar("_S", bound=Section)


def _validated(kind: type[_S], tree: dict[str, Any], culprit: str) -> _S:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{culprit}: {input_error(error, kind)}") from None


def _check_connection(path: Path, config: SiloSettings | NodeSettings) -> None:
    """Refuse settings without a usable address, or with half of the keys."""
    where = f"{'node' if isinstance(config, NodeSettings) else 'silo'} config {path}"
    keys = (config.root_certificates, config.private_key)
    if config.superlink is None:
        raise InputError(f"{where}: superlink: give the address HOST:PORT")
    if not is_address(config.superlink):
        raise InputError(f"{where}: superlink: {config.superlink!r} is not HOST:PORT, as in example.org:443")
    if config.insecure and config.superlink.rpartition(":")[0] not in LOOPBACK:
        raise InputError(f"{where}: insecure: for one machine only; superlink is {config.superlink}")
    if config.insecure and any(keys):
        raise InputError(f"{where}: insecure: excludes root_certificates and private_key")
    if not config.insecure and not all(keys):
        raise InputError(f"{where}: give root_certificates and private_key (or insecure: true, for one machine)")


def _read(path: Path, paths: tuple[str, ...]) -> dict[str, Any]:
    """Read a YAML file and resolve the paths under these keys."""
    tree = load_tree(path)
    base = path.resolve().parent
    for key in paths:
        resolve(tree, key, base)
    return tree
