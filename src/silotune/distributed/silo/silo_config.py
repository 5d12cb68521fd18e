"""What a silo's operator writes: a small YAML file. Nothing a coordinator sends can change what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from silotune.config.input_errors import input_error
from silotune.config.merging import parse_tree, resolve, resolve_backbone
from silotune.config.section import Section
from silotune.config.silos import SiloConfig
from silotune.config.validators import Name
from silotune.errors import InputError

Shared = Literal["validation", "test", "rows", "loss", "seconds"]

LONGEST_SOCKET = 100
"""Bytes in a Unix socket's path; systems allow little more."""


class SiloSettings(Section):
    """One silo.

    `name`: as the coordinator knows it. `folder`: where the silo keeps its own state; only its operator reads it.
    `data`: its rows, with the keys of an entry of `silos` (path, text, label, task, labels, kind, metric); or `rows`:
    a folder of rows as they are. `share`: the numbers that may leave: scores on validation and test rows, row counts
    (and the numbers of steps and tokens, which follow from them), losses, seconds. Without `rows` among them only
    aggregations that do not weigh silos are accepted. `send`: the parts that may leave, by name (`silotune parts
    METHOD`); a run that shares others is refused. `backbone`, `start`, `threads`: on this machine. `secret`: random
    bytes for the silo's own noise; without them noise is refused, unless `seeded_noise` takes it from the run's seed,
    which the coordinator knows. `epsilon`: what all runs over these rows may cost together, whatever budget a run has;
    `delta`: each counted at this δ (1e-5), or at the run's where that is smaller. With `secret` or `epsilon` a run
    without noise is refused. `config`: the configuration that was agreed on; any other is refused. `socket`: where the
    worker listens; `socket_group`: the socket's group may connect too, so that the SuperNode can run as another user,
    who cannot read the rows. `superlink`: address of the coordinator's SuperLink (or of the proxy before it);
    `root_certificates` and `private_key` prove who is who; `insecure` is for one machine.
    """

    name: Name
    folder: str = Field(min_length=1)
    data: SiloConfig | None = None
    rows: str | None = Field(None, min_length=1)
    share: list[Shared]
    send: list[str] | None = None
    backbone: str = "default"
    start: str | None = Field(None, min_length=1)
    secret: str | None = Field(None, min_length=1)
    seeded_noise: bool = False
    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    threads: int | None = Field(None, ge=1, le=1024)
    config: str | None = Field(None, min_length=1)
    socket: str | None = Field(None, min_length=1)
    socket_group: bool = False
    superlink: str | None = Field(None, min_length=1)
    root_certificates: str | None = Field(None, min_length=1)
    private_key: str | None = Field(None, min_length=1)
    insecure: bool = False
    port: int = Field(9094, ge=1, le=65535)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("data"), dict):
            return values | {"data": {"name": values.get("name")} | values["data"]}
        return values

    @model_validator(mode="after")
    def _fitting(self) -> SiloSettings:
        if (self.data is None) == (self.rows is None):
            raise ValueError("give data (a file or folder and its columns) or rows (a folder of prepared rows)")
        if self.data is not None and self.data.name != self.name:
            raise ValueError("data.name: a silo has one name")
        if len(str(self.socket_path).encode()) > LONGEST_SOCKET:
            raise ValueError(f"socket: {self.socket_path} is too long for a Unix socket; set a shorter path")
        if self.delta is not None and self.epsilon is None:
            raise ValueError("delta: belongs to epsilon; give both, or leave delta out")
        if self.insecure and (self.root_certificates or self.private_key):
            raise ValueError("insecure: excludes root_certificates and private_key")
        return self

    @property
    def socket_path(self) -> Path:
        """Where the worker listens."""
        return Path(self.socket) if self.socket else Path(self.folder) / "worker.sock"


def read_silo_settings(path: str | Path) -> SiloSettings:
    """A silo's own configuration; its paths are relative to the file.

    Raises:
        InputError: naming the key and what is allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"silo config {path}: cannot be read ({error})") from error
    tree = parse_tree(text, str(path))
    here = path.resolve().parent
    for key in ("folder", "rows", "start", "secret", "config", "socket", "root_certificates", "private_key"):
        resolve(tree, key, here)
    if isinstance(tree.get("data"), dict):
        resolve(tree["data"], "path", here)
    resolve_backbone(tree, here)
    try:
        return SiloSettings.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"silo config {path}: {input_error(error, SiloSettings)}") from None
