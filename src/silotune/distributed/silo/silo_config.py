"""The operator's file `silo.yaml`: rows, backbone, which numbers may leave, who may learn what, privacy budget.

Nothing that a coordinator sends can change it. Caps bound amounts: numbers that leave, rows and steps behind an update,
time, memory, disk, requests and rounds. Only `policy: private` bounds what an update reveals about single rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from silotune.communication.privacy.accountant import DELTA
from silotune.config.backbone import BackboneConfig
from silotune.config.data import SiloConfig
from silotune.config.paths import absolute
from silotune.config.schema import Figure
from silotune.config.section import Section, input_error
from silotune.config.trees import load_tree
from silotune.config.validators import Address, ConfigPath, Device, Name
from silotune.errors import InputError, unknown_name_error

DisclosedNumbers = Literal["validation", "test", "rows", "loss", "seconds", "status", "reasons"]

LONGEST_SOCKET = 100
"""Bytes in a Unix socket's path; systems allow little more."""


def _amount(value: object) -> object:
    """Accept a count of numbers, or a percentage of the backbone's parameters."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value):
        return value
    raise ValueError(f"must be a whole number, or a share of the backbone such as 3% (got {value!r})")


Amount = Annotated[int | str | None, BeforeValidator(_amount)]
"""A count of numbers, a share of the backbone's parameters (`3%`), or None: no limit."""

Count = Annotated[int | None, Field(ge=0)]


def _identity(value: object) -> str:
    """Accept a public identity as it is told by telephone: in groups, in any case."""
    key = "".join(str(value).split()).lower()
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise ValueError(f"must be the 64 hexadecimal digits that the silo's `silo join` printed (got {len(key)})")
    return key


PRESETS: Mapping[str, str] = {
    "trusting": "the coordinator may learn from updates whatever they tell about single rows",
    "masked": "the coordinator learns sums over silos alone",
    "private": "noise on every step bounds by ε and δ what the coordinator and the other silos learn of each unit",
}
"""Preset of a policy → what it lets others learn."""

REHEARSAL: Mapping[str, Any] = {
    "preset": "trusting",
    **dict.fromkeys(("seconds", "disk_mib", "rounds", "requests_per_round", "requests_in_all")),
    "row_order": "seed",
}
"""The policy of silos whose rows belong to whoever starts the run: no caps, and draws as in one process."""


class PolicyConfig(Section):
    """What a silo lets others learn (`preset`, `row_order`), and caps on the requests that it answers.

    A cap of `null` is no limit; docs/deployment-reference.md describes each cap.

    Args:
        preset: which runs the silo answers. `trusting`: any; the coordinator may learn whatever updates reveal.
            `masked`: only runs that sum under masks with the silos of `masked.peers`. `private`: only runs with noise
            on rows, within the budget `privacy`. `policy: private` is short for `policy: {preset: private}`.
        row_order: what row order, splits and dropout are drawn from. `secret`: a secret that only the silo has.
            `seed`: the run's seed, as in one process, so that the coordinator knows them.
    """

    preset: Literal["trusting", "masked", "private"]
    numbers_per_round: Amount = None
    numbers_in_all: Amount = None
    train_rows: int = Field(default=0, ge=0)
    train_steps: int = Field(default=0, ge=0)
    seconds: float | None = Field(default=86_400, ge=0)
    memory_mib: Count = None
    disk_mib: Count = 65_536
    rounds: Count = 1000
    requests_per_round: Count = 3
    requests_in_all: Count = 100_000
    frame_mib: int = Field(default=1024, ge=1)
    row_order: Literal["secret", "seed"] = "secret"

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Read a preset's name alone, and require one."""
        value = {"preset": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        name = value.get("preset")
        if name is None:
            raise ValueError(f"preset: choose who may learn what: {choices()}")
        if name not in PRESETS:
            raise ValueError(str(unknown_name_error("policy", name, PRESETS)))
        return value


def choices() -> str:
    """Return the presets of a policy, each with what it lets others learn, to choose from."""
    return "; ".join(f"{name} ({PRESETS[name]})" for name in PRESETS)


class RowBudget(Section):
    """What all runs over a silo's rows may cost each unit, together.

    Args:
        unit: `row`, or the column whose values are the units, such as `patient`.
    """

    unit: str = Field(default="row", min_length=1)
    epsilon: float = Field(gt=0)
    delta: float = Field(default=DELTA, gt=0, lt=1)


class MaskedConfig(Section):
    """The silos with which this one sums under masks (`aggregation.secure`).

    Args:
        identity: the file of this silo's private identity key, 32 bytes.
        peers: name → public identity key of every silo, this one included, as `silo doctor` shows it. The operators
            compare the fingerprint of this list without the coordinator, who could otherwise be all the others.
        least: the fewest silos of a sum, the same at all silos; if unset, more than two thirds of the list.
        colluders: in runs in which silos share one noise (`privacy.shares`), how many other silos may spy, help the
            coordinator or leave out their noise, the same at all silos; if unset, 1. With `policy: private` it has to
            be given for such runs.
    """

    identity: ConfigPath
    peers: dict[Name, Annotated[str, BeforeValidator(_identity)]] = Field(min_length=1)
    least: int | None = Field(default=None, ge=1)
    colluders: int | None = Field(default=None, ge=0)

    @property
    def assumed(self) -> int:
        """The number of colluders that ε of shared noise allows for."""
        return 1 if self.colluders is None else self.colluders


class SiloSettings(Section):
    """The settings of one silo's worker and SuperNode; `read_silo_settings` reads them.

    Args:
        folder: the folder for the silo's states and replies; readable by its operator only.
        data: the silo's rows, with the keys of an entry of `silos` (path, text, label, task, labels, kind, metric).
        rows: a folder of prepared rows, instead of `data`.
        share: the numbers that may leave: `validation` and `test` scores, `rows` (row counts, and the counts of steps,
            which follow from them), `loss`, `seconds`, `status` (whether the rows changed, the ε that is
            left, free space on disk), and `reasons` (why something failed here, in one of a few phrases). If the list
            lacks `rows`, only aggregations that do not weigh silos are accepted. `send` is about shared parts.
        survey: the figures that surveys may ask for (`silotune survey`); counts below 10 leave as `< 10`.
        send: names of the parts that may leave (`silotune parts METHOD`); a run that shares others is refused.
        backbone: the backbone's name or folder on this machine, or a section with the keys of how it is loaded.
        secret: a file with random bytes from which the silo's noise is drawn. Without it noise is refused, unless
            `seeded_noise` is set.
        seeded_noise: draw the noise from the run's seed, which the coordinator knows.
        epsilon: the ε that all runs over these rows may spend together, whatever budget each run has; `unlimited` says
            that there is no limit. `secret` needs it: noise without a limit on ε can be as weak as a coordinator likes.
            If `secret` or `epsilon` is set, a run without noise is refused.
        delta: the δ of that budget (default 1e-5); a run's own δ is used if it is smaller.
        privacy: the budget of noise on rows; with `policy: private`, needed. A run at another unit is refused.
        masked: the silos with which this one sums under masks; needed for runs with `aggregation.secure`.
        canaries: the most rows of random words that a run may add for an audit (`audit.canaries`).
        rank: the largest LoRA rank that this silo trains and sends; a run with a larger `tuner.r` continues here with
            this rank, if its aggregation combines several ranks.
        policy: caps on what is answered at all (`PolicyConfig`), or the name of a preset of them.
        approval: `ask`: a run that this silo has not seen waits until its operator approves it (`silotune silo`);
            `policy`: what the policy allows is approved. With `config`, the agreed configuration is approved.
        config: the file of the configuration that the parties agreed on; any other is refused.
        changed_rows: `refuse` or `accept` a run whose rows changed since its first request. The coordinator learns of
            the change in both cases, without counts.
        socket_group: whether the socket's group may connect, so that the SuperNode can run as a user who cannot read
            the rows.
        superlink: the address of the coordinator's SuperLink, or of the proxy before it.
        root_certificates: a file of certificate authorities that prove the coordinator's identity.
        private_key: the file of the key that proves the silo's identity.
        metrics_port: a port on 127.0.0.1 where the worker serves its metrics for Prometheus; None serves none.
    """

    name: Name
    folder: ConfigPath = Field(min_length=1)
    data: SiloConfig | None = None
    rows: ConfigPath | None = Field(default=None, min_length=1)
    share: list[DisclosedNumbers]
    survey: list[Figure] = []
    send: list[str] | None = None
    backbone: BackboneConfig = BackboneConfig()
    start: ConfigPath | None = Field(default=None, min_length=1)
    secret: ConfigPath | None = Field(default=None, min_length=1)
    seeded_noise: bool = False
    epsilon: Annotated[float, Field(gt=0)] | Literal["unlimited"] | None = None
    delta: float | None = Field(default=None, gt=0, lt=1)
    privacy: RowBudget | None = None
    masked: MaskedConfig | None = None
    canaries: int = Field(default=0, ge=0)
    rank: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1, le=1024)
    device: Device = "auto"
    policy: PolicyConfig
    approval: Literal["ask", "policy"] = "ask"
    config: ConfigPath | None = Field(default=None, min_length=1)
    changed_rows: Literal["refuse", "accept"] = "refuse"
    socket: ConfigPath | None = Field(default=None, min_length=1)
    socket_group: bool = False
    superlink: Address | None = None
    root_certificates: ConfigPath | None = Field(default=None, min_length=1)
    private_key: ConfigPath | None = Field(default=None, min_length=1)
    insecure: bool = False
    port: int = Field(default=9094, ge=1, le=65535)
    metrics_port: int | None = Field(default=None, ge=1, le=65535)

    @model_validator(mode="before")
    @classmethod
    def _name_in_data(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if "policy" not in values:
            raise ValueError(f"policy: choose who may learn what: {choices()}")
        if isinstance(values.get("data"), dict):
            return values | {"data": {"name": values.get("name")} | values["data"]}
        return values

    @model_validator(mode="after")
    def _check_together(self) -> SiloSettings:
        if (self.data is None) == (self.rows is None):
            raise ValueError("give data (a file or folder and its columns) or rows (a folder of prepared rows)")
        if self.data is not None and self.data.name != self.name:
            raise ValueError("data.name: a silo has one name")
        if self.data is not None and self.data.rank is not None:
            raise ValueError("data.rank: give rank, beside data")
        if len(str(self.socket_path).encode()) > LONGEST_SOCKET:
            raise ValueError(f"socket: {self.socket_path} is too long for a Unix socket; set a shorter path")
        if self.delta is not None and self.epsilon is None:
            raise ValueError("delta: belongs to epsilon; give both, or leave delta out")
        if self.secret is not None and self.epsilon is None:
            raise ValueError(
                "epsilon: is missing beside secret: noise protects only as far as ε is limited; give the ε of all runs "
                "over these rows together, or epsilon: unlimited"
            )
        if self.policy.preset == "private" and self.privacy is None:
            raise ValueError("policy: private needs the budget of each row or person, e.g. privacy: {epsilon: 8}")
        if self.policy.preset == "masked" and self.masked is None:
            raise ValueError("policy: masked needs the silos that it sums with: masked: {identity: FILE, peers: {…}}")
        if self.masked is not None and self.name not in self.masked.peers:
            raise ValueError(f"masked.peers: lacks this silo, {self.name}")
        if self.insecure and (self.root_certificates or self.private_key):
            raise ValueError("insecure: excludes root_certificates and private_key")
        return self

    @property
    def budget(self) -> float | None:
        """The ε of all runs together; None without a limit."""
        return None if self.epsilon == "unlimited" else self.epsilon

    @property
    def socket_path(self) -> Path:
        """Path of the worker's socket."""
        return Path(self.socket) if self.socket else Path(self.folder) / "worker.sock"


S = TypeVar("S", bound=Section)


def read_silo_settings(path: str | Path) -> SiloSettings:
    """Read a silo's settings; paths are relative to the file."""
    return read_settings(Path(path), SiloSettings, "silo")


def read_settings(path: Path, kind: type[S], party: str) -> S:
    """Read the file of a party; paths are relative to the file."""
    tree = absolute(load_tree(path), path.resolve().parent, kind)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{party} config {path}: {input_error(error, kind)}") from None
