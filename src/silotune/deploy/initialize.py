"""`silotune federation init` makes a coordinator's files and units; `renew`, new certificates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from silotune.core.yaml_text import dump_yaml
from silotune.deploy.certificates import (
    KeyPair,
    days_left,
    fingerprint,
    make_authority,
    make_server_certificate,
    names_in,
)
from silotune.deploy.owned_files import (
    filled,
    install_units,
    like,
    make_user,
    own,
    program,
    replace,
    require_absent,
    require_root,
    state_folder,
    write_new,
)
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.distributed.flower.commands import require_flower
from silotune.errors import InputError

USER = "silotune"
"""The coordinator's user."""

STATE = Path("/var/lib/silotune")
"""The coordinator's folder, where units are installed."""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Initialized:
    """What `init` made.

    Args:
        coordinator: the coordinator's file.
        proxy: nginx's file.
        fingerprint: of the authority's certificate.
        started: whether systemd has started coordinator and proxy.
    """

    coordinator: Path
    proxy: Path
    fingerprint: str
    started: bool


def init(folder: Path, host: str, port: int = 443, inner_port: int = 8443, install: bool = False) -> Initialized:
    """Make a coordinator's folder: authority, certificate, `coordinator.yaml`, `nginx.conf`, systemd units.

    Args:
        folder: where to; none of the files may exist.
        host: the public name, in the certificate and in nginx's file.
        port: the proxy's.
        inner_port: the SuperLink's on 127.0.0.1; enrollment listens on the next.
        install: make the user `silotune`, give it its files, install units and start them; for root.
    """
    require_flower()
    if not _HOST.fullmatch(host):
        raise InputError(f"--host {host!r}: is not the name of a machine (like coordinator.example.org) or an address")
    if not 1 <= inner_port <= 65534 or port in (inner_port, inner_port + 1):
        raise InputError("--inner-port: needs two free ports, this and the next, other than --port")
    if install:
        require_root()
    folder = folder.resolve()
    link = STATE / "link" if install else folder / "link"
    tree = {
        "folder": str(link) if install else "link",
        "port": inner_port,
        "ca": "tls/ca.pem",
        "certificate": "tls/server.pem",
        "key": "tls/server.key",
        "public_address": f"{host}:{port}",
        "enrollment_port": inner_port + 1,
    }
    nginx = filled(
        "nginx.conf",
        {
            "listen 443 ssl": f"listen {port} ssl",
            "coordinator.example.org": host,
            "127.0.0.1:8443": f"127.0.0.1:{inner_port}",
            "127.0.0.1:8444": f"127.0.0.1:{inner_port + 1}",
            "/etc/silotune/tls": str(folder / "tls"),
        },
    )
    if not install:  # nginx may run as any user
        nginx = nginx.replace("/run/nginx-silotune.pid", str(folder / "nginx.pid"))
    units = {
        name: filled(f"systemd/{name}", {example: value})
        for name, example, value in (
            (
                "silotune-coordinator.service",
                "/opt/silotune/bin/silotune federation up /etc/silotune/coordinator.yaml",
                f"{program()} federation up {folder / 'coordinator.yaml'}",
            ),
            ("silotune-proxy.service", "/etc/silotune/nginx.conf", str(folder / "nginx.conf")),
        )
    }
    tls = folder / "tls"
    coordinator, proxy = folder / "coordinator.yaml", folder / "nginx.conf"
    made = [tls / name for name in ("ca.key", "ca.pem", "server.key", "server.pem")]
    require_absent([coordinator, proxy, *made], "choose another folder, or `silotune federation renew`")
    authority = make_authority(host)
    server = make_server_certificate(authority, host)
    tls.mkdir(parents=True, exist_ok=True)
    write_new(tls / "ca.key", authority.key, 0o600)
    write_new(tls / "ca.pem", authority.certificate)
    write_new(tls / "server.key", server.key, 0o600)
    write_new(tls / "server.pem", server.certificate)
    write_new(proxy, nginx)
    write_new(coordinator, dump_yaml(tree))
    started = False
    if install:
        make_user(USER)
        own(tls / "server.key", USER)
        state_folder(STATE, USER)
        state_folder(link, USER)
        started = install_units(units)
    else:
        link.mkdir(mode=0o700, exist_ok=True)
        for name, text in units.items():
            if not (folder / "systemd" / name).exists():
                write_new(folder / "systemd" / name, text)
    return Initialized(coordinator, proxy, fingerprint(authority.certificate), started)


def renew(settings: CoordinatorSettings, authority: bool = False, key: Path | None = None) -> float:
    """Make a new server certificate for the same names, or a new authority that is trusted beside the old one.

    The old files stay as `NAME.old`.

    Args:
        settings: the coordinator's.
        authority: make a new authority; the server's certificate changes with the next renewal, when all silos have
            the new `ca.pem`.
        key: the authority's key; `ca.key` beside `ca.pem` by default.

    Returns:
        The days for which the new certificate is valid.
    """
    require_flower()
    if settings.ca is None or settings.certificate is None or settings.key is None:
        raise InputError("renew: a coordinator without TLS has no certificates")
    ca, certificate, server_key = Path(settings.ca), Path(settings.certificate), Path(settings.key)
    host = _host_of(settings, certificate)
    key = key or ca.with_name("ca.key")
    if authority:
        fresh = make_authority(host)
        replace(key, fresh.key, 0o600)
        replace(ca, fresh.certificate + ca.read_bytes(), 0o644)
        return days_left(fresh.certificate)
    try:
        signer = KeyPair(key.read_bytes(), ca.read_bytes())
    except OSError as error:
        raise InputError(f"--key {key}: cannot be read ({error.strerror}); it is where `init` or you put it") from error
    server = make_server_certificate(signer, host)
    replace(server_key, server.key, 0o600)
    replace(certificate, server.certificate, 0o644)
    like(Path(settings.folder) if Path(settings.folder).exists() else certificate, server_key)
    return days_left(server.certificate)


def _host_of(settings: CoordinatorSettings, certificate: Path) -> str:
    """Return the public name: of `public_address`, else the certificate's first."""
    if settings.public_address:
        return settings.public_address.rpartition(":")[0]
    names = names_in(certificate)
    if not names:
        raise InputError(f"{certificate}: names no host; set public_address in the coordinator's file")
    return names[0]
