"""Make a coordinator's certificates, settings and units (`federation init`), and renew them (`renew`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from silotune.core.files import dump_yaml
from silotune.deploy.certificates import (
    KeyPair,
    days_left,
    fingerprint,
    make_authority,
    make_server_certificate,
    names_in,
)
from silotune.deploy.files import filled, install, program, replace_content, require_absent, require_root, write_new
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.flower.commands import require_flower
from silotune.errors import InputError, file_errors

STATE = Path("/var/lib/silotune/link")
"""The coordinator's folder, where units are installed."""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Initialized:
    """The files that `federation init` made."""

    coordinator: Path
    proxy: Path
    fingerprint: str
    started: bool


def init(folder: Path, host: str, port: int = 443, inner_port: int = 8443, installs: bool = False) -> Initialized:
    """Make a coordinator's folder: authority, certificate, `coordinator.yaml`, `nginx.conf`, systemd units."""
    require_flower()
    if not _HOST.fullmatch(host):
        raise InputError(f"--host {host!r}: is not the name of a machine (like coordinator.example.org) or an address")
    if not 1 <= inner_port <= 65534 or port in (inner_port, inner_port + 1):
        raise InputError("--inner-port: needs two free ports, this and the next, other than --port")
    if installs:
        require_root()
    folder = folder.resolve()
    tls, units = folder / "tls", folder / "systemd"
    coordinator, proxy = folder / "coordinator.yaml", folder / "nginx.conf"
    tls_files = [tls / name for name in ("ca.key", "ca.pem", "server.key", "server.pem")]
    require_absent([coordinator, proxy, *tls_files, units], "choose another folder, or `silotune federation renew`")
    authority = make_authority(host)
    server = make_server_certificate(authority, host)
    write_new(tls / "ca.key", authority.key, 0o600)
    write_new(tls / "ca.pem", authority.certificate)
    write_new(tls / "server.key", server.key, 0o600)
    write_new(tls / "server.pem", server.certificate)
    settings = {
        "folder": str(STATE) if installs else "link",
        "port": inner_port,
        "ca": "tls/ca.pem",
        "certificate": "tls/server.pem",
        "key": "tls/server.key",
        "public_address": f"{host}:{port}",
        "enrollment_port": inner_port + 1,
    }
    write_new(coordinator, dump_yaml(settings))
    values = {
        "listen 443 ssl": f"listen {port} ssl",
        "coordinator.example.org": host,
        "127.0.0.1:8443": f"127.0.0.1:{inner_port}",
        "127.0.0.1:8444": f"127.0.0.1:{inner_port + 1}",
        "/etc/silotune/tls": str(tls),
    }
    if not installs:  # nginx may run as any user
        values["/run/nginx-silotune.pid"] = str(folder / "nginx.pid")
    write_new(proxy, filled("nginx.conf", values))
    paths = {"/etc/silotune": str(folder)}
    for name, more in (("coordinator", {"/opt/silotune/bin/silotune": program()}), ("proxy", {})):
        unit = f"silotune-{name}.service"
        write_new(units / unit, filled(f"systemd/{unit}", more | paths))
    write_new(units / "sysusers.conf", filled("systemd/coordinator.sysusers.conf", {}))
    write_new(units / "tmpfiles.conf", filled("systemd/coordinator.tmpfiles.conf", paths))
    started = install(units) if installs else False
    return Initialized(coordinator, proxy, fingerprint(authority.certificate), started)


def renew(settings: CoordinatorSettings, authority: bool = False, key: Path | None = None) -> float:
    """Make a new server certificate for the same names, or a new authority that is trusted beside the old one.

    The old files stay as `NAME.old`. The server's certificate changes with the next renewal, when silos have the new
    authority. Returns the days for which the new certificate is valid.
    """
    if settings.ca is None or settings.certificate is None or settings.key is None:
        raise InputError("renew: a coordinator without TLS has no certificates")
    ca, certificate = Path(settings.ca), Path(settings.certificate)
    host = (settings.public_address or "").rpartition(":")[0] or next(iter(names_in(certificate)), "")
    if not host:
        raise InputError(f"{certificate}: names no host; set public_address in the coordinator's file")
    key = key or ca.with_name("ca.key")
    with file_errors(f"--key {key}: cannot be read; it is where `init` or you put it"):
        signer = KeyPair(key.read_bytes(), ca.read_bytes())
    if authority:
        fresh = make_authority(host)
        replace_content(key, fresh.key)
        replace_content(ca, fresh.certificate + signer.certificate)
        return days_left(fresh.certificate)
    server = make_server_certificate(signer, host)
    replace_content(Path(settings.key), server.key)
    replace_content(certificate, server.certificate)
    return days_left(server.certificate)
