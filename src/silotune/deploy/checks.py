"""`Finding`, and checks that both doctors share: secrets, certificates, disk, ports, the way to the proxy."""

from __future__ import annotations

import shutil
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

from silotune.deploy.certificates import days_left, fingerprint
from silotune.deploy.coordinator_client import ask
from silotune.deploy.enrollment import PATH
from silotune.distributed.protocol.frames import PROTOCOL
from silotune.errors import SilotuneError
from silotune.version import __version__

State = Literal["ok", "problem", "skipped"]

SOON = 30
"""Days before a certificate expires at which that is a problem."""

AHEAD, BEHIND = 5, 300
"""Seconds that a node's clock may be ahead of the SuperLink's, and behind it, by Flower's check of signatures."""

DISK = 2**30
"""Bytes that should be free."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: what was checked.
        state: `skipped` if it could not be checked, because of another problem or because it does not apply.
        detail: what was found.
        remedy: what to do, for a problem.
    """

    check: str
    state: State
    detail: str
    remedy: str = ""


def attempt(check: str, remedy: str, examine: Callable[[], str]) -> Finding:
    """Run a check that returns what it found; an error is a problem."""
    try:
        return Finding(check, "ok", examine())
    except (SilotuneError, OSError, RuntimeError, ValueError) as error:
        return Finding(check, "problem", " ".join(str(error).split()) or type(error).__name__, remedy)


def check_secret(check: str, path: str | Path) -> Finding:
    """Check that a secret file can be read by this user and by no other."""
    path = Path(path)
    try:
        status = path.stat()
        path.open("rb").close()
    except OSError as error:
        return Finding(
            check, "problem", f"{path}: {error.strerror}", "run the doctor as the file's user, or restore it"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return Finding(check, "problem", f"{path}: others may read it (mode {mode:04o})", f"chmod 600 {path}")
    return Finding(check, "ok", f"{path}: mode {mode:04o}, user {status.st_uid}")


def check_certificate(check: str, path: str | Path, remedy: str) -> Finding:
    """Check that a certificate is valid for another month."""
    try:
        pem = Path(path).read_bytes()
        left = days_left(pem)
    except (OSError, SilotuneError) as error:
        return Finding(check, "problem", f"{path}: {error}", remedy)
    detail = f"{path}: {left:.0f} days left, sha256 {fingerprint(pem)}"
    return Finding(check, "ok", detail) if left >= SOON else Finding(check, "problem", detail, remedy)


def check_disk(folder: str | Path) -> Finding:
    """Check that there is room where states and logs are written."""
    place = Path(folder)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**30:.1f} GiB free at {folder}"
    return Finding("disk", "ok", detail) if free >= DISK else Finding("disk", "problem", detail, "make room")


def check_port(port: int) -> Finding:
    """Tell whether a port on 127.0.0.1 is free, or used: by this party's processes, if they run."""
    with socket.socket() as probe:
        probe.settimeout(5)
        used = probe.connect_ex(("127.0.0.1", port)) == 0
    return Finding("port", "ok", f"{port} on 127.0.0.1 is {'in use' if used else 'free'}")


def check_proxy(address: str, authority: bytes) -> list[Finding]:
    """Check the way to the coordinator: name, certificate, clock, forbidden paths, versions.

    Args:
        address: HOST:PORT of the proxy.
        authority: certificates, PEM.
    """
    ca = authority.decode("ascii", "replace")
    later = ("clock", "control API", "version")
    try:
        status, answer = ask(address, ca, "GET", "/health", seconds=20)
    except SilotuneError as error:
        remedy = "check the proxy, the firewall, the name and the authority's certificate"
        return [
            Finding("connection", "problem", str(error), remedy),
            *(Finding(name, "skipped", "no connection") for name in later),
        ]
    except ValueError as error:
        return [Finding("connection", "problem", f"the authority's certificate: {error}", "ask for it again")]
    healthy = status == 200
    found = [
        Finding("connection", "ok" if healthy else "problem", f"{address}: /health answers {status}",
                "" if healthy else "start the coordinator (`silotune federation up`)")
    ]  # fmt: skip
    found.append(_clock(answer["headers"].get("date")))
    found.append(_control(address, ca))
    found.append(_version(address, ca))
    return found


def _clock(date: str | None) -> Finding:
    """Compare this machine's clock with the server's header."""
    try:
        server = parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return Finding("clock", "skipped", "the coordinator's proxy tells no time")
    ahead = time.time() - server
    detail = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the coordinator"
    if -BEHIND < ahead < AHEAD:
        return Finding("clock", "ok", detail)
    return Finding("clock", "problem", detail, "set the clock, best by NTP: nodes that are off are refused")


def _control(address: str, ca: str) -> Finding:
    """Check that the proxy hides the Control API."""
    try:
        status, _ = ask(address, ca, "POST", "/v1/control/list-runs", {}, seconds=20)
    except SilotuneError as error:
        return Finding("control API", "problem", str(error), "look at the proxy's log")
    if status == 404:
        return Finding("control API", "ok", "not reachable (404)")
    remedy = "stop the proxy now, and use the nginx.conf of `federation init`: who reaches it runs code on the silos"
    return Finding("control API", "problem", f"reachable: HTTP status {status}", remedy)


def _version(address: str, ca: str) -> Finding:
    """Compare protocol and version with the coordinator's."""
    try:
        status, answer = ask(address, ca, "GET", PATH, seconds=20)
    except SilotuneError as error:
        return Finding("version", "problem", str(error), "look at the proxy's log")
    if status != 200:
        return Finding("version", "skipped", f"the coordinator does not tell its version (HTTP status {status})")
    own, theirs = (__version__, PROTOCOL), (answer.get("version"), answer.get("protocol"))
    detail = f"silotune {own[0]}, protocol {own[1]}; coordinator: {theirs[0]}, {theirs[1]}"
    return Finding("version", "ok" if own == theirs else "problem", detail,
                   "" if own == theirs else "install the coordinator's version")  # fmt: skip


def as_fields(findings: list[Finding]) -> list[dict[str, Any]]:
    """Return findings as plain values, for JSON."""
    return [{"check": f.check, "state": f.state, "detail": f.detail, "remedy": f.remedy} for f in findings]
