"""Check all that a run needs at a coordinator or silo, and name a remedy for each problem."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from silotune.config import BackboneConfig
from silotune.deploy.certificates import days_left, fingerprint, names_in
from silotune.deploy.enrollment import PATH, ask
from silotune.deploy.joining import config_of_one
from silotune.deploy.settings import CoordinatorSettings, NodeSettings
from silotune.distributed.protocol.frames import PROTOCOL
from silotune.distributed.silo.mask_work import masks_line
from silotune.distributed.silo.secret import SECRET_FILE
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import SilotuneError
from silotune.version import __version__

SOON = 30
"""A certificate that expires within so many days is a problem."""

AHEAD, BEHIND = 5, 300
"""Seconds that a node's clock may be ahead of the SuperLink's, and behind it, by Flower's check of signatures."""

DISK = 2**30
"""The least bytes that should be free on the disk."""

_RENEW = "silotune federation renew FILE"

_SILO_RENEWS = "ask the coordinator for an invitation with the new one: silotune silo join FILE --new-key"

_REGISTER = "ask the coordinator whether it expelled this silo; after an invitation: silotune silo join FILE --new-key"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    state: Literal["ok", "problem", "skipped"]
    detail: str
    remedy: str = ""


def examine_coordinator(settings: CoordinatorSettings, backbone: str = "default") -> list[Finding]:
    """Check a coordinator: key files, certificates, the way to it, disk and backbone."""
    checks = []
    if settings.ca and settings.certificate and settings.key:
        certificate, ca, address = settings.certificate, settings.ca, settings.public_address
        checks = [check_secret("server key", settings.key), _valid("certificate", certificate, _RENEW)]
        checks.append(_valid("authority", ca, f"{_RENEW} --authority"))
        if (authority_key := Path(ca).with_name("ca.key")).exists():
            checks.append(check_secret("authority's key", authority_key))
        if address:
            checks.append(attempt("name", _RENEW, lambda: _named(address.rpartition(":")[0], Path(certificate))))
            checks += check_proxy(address, ca)
    return [*checks, _disk(settings.folder), _backbone(BackboneConfig(name=backbone), "auto")]


def examine_silo(settings: SiloSettings | NodeSettings, train: bool = True) -> list[Finding]:
    """Check a silo, or its node alone if the settings are a node's; `train` adds one training step, kept here."""
    checks = []
    if settings.private_key and settings.root_certificates and settings.superlink:
        if isinstance(settings, NodeSettings) or not settings.socket_group:  # else the node's user reads it
            checks.append(check_secret("key", settings.private_key))
        checks.append(_valid("authority", settings.root_certificates, _SILO_RENEWS))
        checks += check_proxy(settings.superlink, settings.root_certificates)
        if checks[-1].state != "skipped" and os.access(settings.private_key, os.R_OK):
            way = settings.superlink, settings.root_certificates, settings.private_key
            checks.append(attempt("registration", _REGISTER, partial(_is_registered, *way)))
    checks.append(_disk(settings.folder))
    if isinstance(settings, NodeSettings):
        remedy = "start the worker (`silotune worker SILO_YAML`)"
        path = settings.socket_path
        return [*checks, attempt("worker", remedy, lambda: (path.is_socket(), f"socket {path}"))]
    own = Path(settings.folder) / SECRET_FILE
    if settings.secret:
        checks.append(check_secret("secret", settings.secret))
    if own.exists():
        checks.append(check_secret("order of rows", own))
    if settings.masked is not None:
        checks.append(check_secret("identity", settings.masked.identity))
        remedy = "put the identities of all silos into masked.peers; each operator tells theirs (`silo join` showed it)"
        checks.append(attempt("peers", remedy, lambda: (True, masks_line(settings))))
    rows = Path(settings.rows or (settings.data.path if settings.data else ""))
    if rows.exists():
        checks.append(check_rows(rows))
    checks.append(_backbone(settings.backbone, settings.device))
    if train:
        remedy = "correct data, backbone or device in the file"
        checks.append(attempt("dry round", remedy, lambda: _dry_round(settings)))
    return checks


Judged = tuple[bool, str]
"""Whether something is as it should be, and what was found."""


def attempt(check: str, remedy: str, examine: Callable[[], Judged]) -> Finding:
    """Run a check and return its finding; an error that it raises is a problem, too."""
    try:
        good, detail = examine()
        return Finding(check, "ok", detail) if good else Finding(check, "problem", detail, remedy)
    except (SilotuneError, OSError, RuntimeError, ValueError) as error:
        return Finding(check, "problem", " ".join(str(error).split()) or type(error).__name__, remedy)


def check_secret(check: str, path: str | Path) -> Finding:
    """Check that a secret file can be read by this user and by no other."""

    def look() -> Judged:
        mode = Path(path).stat().st_mode & 0o777
        Path(path).open("rb").close()
        return not mode & 0o077, f"{path}: {'others may read it, ' if mode & 0o077 else ''}mode {mode:04o}"

    return attempt(check, f"chmod 600 {path}, and run the doctor as its user", look)


def check_rows(path: Path) -> Finding:
    """Check that no other user of this machine can read the rows."""

    def look() -> Judged:
        for folder in path.absolute().parents:  # who cannot enter a folder reads nothing below it
            if not folder.stat().st_mode & 0o011:
                return True, f"{path}: no other user enters {folder}"
        files = [file for file in (path, *path.rglob("*")) if file.is_file() and file.stat().st_mode & 0o044]
        return not files, f"{files[0]}: other users may read it" if files else f"{path}: no other user may read it"

    return attempt("rows", f"chmod -R go= {shlex.quote(str(path))}", look)


def check_proxy(address: str, certificates: str | Path) -> list[Finding]:
    """Check the way to the coordinator: name, certificate, clock, forbidden paths, versions."""

    def get(method: str, path: str) -> tuple[int, dict[str, Any]]:
        return ask(address, Path(certificates), method, path, seconds=20)

    try:
        status, answer = get("GET", "/health")
    except SilotuneError as error:
        remedy = "check the proxy, the firewall, the name and the authority's certificate"
        later = [Finding(name, "skipped", "no connection") for name in ("clock", "control API", "version")]
        return [Finding("connection", "problem", str(error), remedy), *later]
    exposed = "stop the proxy now, and use the nginx.conf of `federation init`: who reaches it runs code on the silos"

    def control() -> Judged:
        code = get("POST", "/v1/control/list-runs")[0]
        return code == 404, "not reachable (404)" if code == 404 else f"reachable: HTTP status {code}"

    start, health = "start the coordinator (`silotune federation up`)", f"{address}: /health answers {status}"
    return [
        attempt("connection", start, lambda: (status == 200, health)),
        attempt("clock", "set the clock, best by NTP: nodes that are off are refused", lambda: _clock(answer["date"])),
        attempt("control API", exposed, control),
        attempt("version", "install the coordinator's version", lambda: _same_version(*get("GET", PATH))),
    ]


def _valid(check: str, path: str, remedy: str) -> Finding:
    """Check that a certificate is valid for another month."""

    def look() -> Judged:
        pem = Path(path).read_bytes()
        return days_left(pem) >= SOON, f"{path}: {days_left(pem):.0f} days left, sha256 {fingerprint(pem)}"

    return attempt(check, remedy, look)


def _clock(date: str | None) -> Judged:
    """Compare this machine's clock with the server's header."""
    ahead = time.time() - parsedate_to_datetime(date or "").timestamp()
    return -BEHIND < ahead < AHEAD, f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the coordinator"


def _same_version(status: int, answer: dict[str, Any]) -> Judged:
    """Compare protocol and version with the coordinator's."""
    if status != 200:
        return False, f"the coordinator does not tell its version (HTTP status {status})"
    own, theirs = (__version__, PROTOCOL), (answer.get("version"), answer.get("protocol"))
    return own == theirs, f"silotune {own[0]}, protocol {own[1]}; coordinator: {theirs[0]}, {theirs[1]}"


def _is_registered(superlink: str, authority: str, private_key: str) -> Judged:
    from silotune.distributed.flower.node_key import find_key  # it imports Flower

    return find_key(superlink, Path(authority), Path(private_key))


def _disk(folder: str) -> Finding:
    """Check that there is room where states are written."""

    def look() -> Judged:
        place = next(place for place in (Path(folder).resolve(), *Path(folder).resolve().parents) if place.exists())
        free = shutil.disk_usage(place).free
        return free >= DISK, f"{free / 2**30:.1f} GiB free at {folder}"

    return attempt("disk", "make room", look)


def _named(host: str, certificate: Path) -> Judged:
    names = names_in(certificate)
    return host in names, f"{certificate}: is for {', '.join(names) or 'no host'}, and the host is {host}"


def _backbone(backbone: BackboneConfig, device: str) -> Finding:
    """Load the backbone where runs load it, and tell the hash that the handshake compares."""
    from silotune.models.backbone.loading import load_backbone

    def load() -> Judged:
        loaded = load_backbone(backbone, device=device)
        return True, f"{backbone.name} on {loaded.device}, sha256 {loaded.fingerprint}"

    return attempt("backbone", "check backbone and device, and that its files are on this machine", load)


def _dry_round(settings: SiloSettings) -> Judged:
    """Train one step over this silo's rows as its policy has it, in a folder that is removed."""
    from silotune.data.row_folder import read_rows
    from silotune.runs.run import run

    if settings.data is None:
        assert settings.rows is not None, "the file was checked"
        splits = read_rows(Path(settings.rows), settings.name).splits
        return True, f"read {len(splits.train)} training rows of a prepared folder; such rows are trained in runs only"
    tree: dict[str, Any] = {
        "silos": [settings.data.model_dump(mode="json", exclude_none=True)],
        "rounds": 1,
        "train": {"steps": 1, "batch_size": 2},
        "backbone": settings.backbone.model_dump(mode="json"),
        "device": settings.device,
    }
    if settings.privacy is not None:  # noise needs a method that sends something
        tree |= {"method": "fedavg", "privacy": settings.privacy.model_dump()}
    with tempfile.TemporaryDirectory(prefix="silotune-") as folder:
        summary = run(config_of_one(tree), out=Path(folder) / "run").summary
    rows = summary["silos"][settings.name]["rows"]
    noised = "" if settings.privacy is None else f" with noise for each {settings.privacy.unit}"
    return True, f"trained one step{noised}, scored {rows['validation']} validation and {rows['test']} test rows"
