"""`examine_coordinator` and `examine_silo`: the checks of `federation doctor` and `silo doctor`; a dry round."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from silotune.config import BackboneConfig
from silotune.deploy.certificates import names_in
from silotune.deploy.checks import (
    Finding,
    attempt,
    check_certificate,
    check_disk,
    check_port,
    check_proxy,
    check_secret,
)
from silotune.deploy.joining import config_of_one
from silotune.deploy.party_configs import CoordinatorSettings, NodeSettings
from silotune.distributed.silo.secret import SECRET_FILE
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import InputError

_SILO_RENEWS = "ask the coordinator for an invitation with the new one: silotune silo join FILE --new-key"


def examine_coordinator(settings: CoordinatorSettings, backbone: str = "default") -> list[Finding]:
    """Check a coordinator.

    Args:
        settings: the coordinator's.
        backbone: the one whose hash silos compare.
    """
    found = []
    if settings.ca and settings.certificate and settings.key:
        found.append(check_secret("server key", settings.key))
        found.append(check_certificate("certificate", settings.certificate, "silotune federation renew FILE"))
        found.append(check_certificate("authority", settings.ca, "silotune federation renew FILE --authority"))
        found.append(_authority_key(Path(settings.ca).with_name("ca.key")))
        if settings.public_address:
            host = settings.public_address.rpartition(":")[0]
            certificate = Path(settings.certificate)
            found.append(attempt("name", "silotune federation renew FILE", lambda: _named(host, certificate)))
            found += attempt_proxy(settings.public_address, settings.ca)
        else:
            found.append(Finding("name", "skipped", "public_address is not set"))
    else:
        found.append(Finding("certificate", "skipped", "insecure: no TLS, for one machine only"))
    found.append(check_port(settings.port))
    found.append(check_disk(settings.folder))
    found.append(_backbone(BackboneConfig(name=backbone), "auto"))
    return found


def examine_silo(settings: SiloSettings | NodeSettings, train: bool = True) -> list[Finding]:
    """Check a silo, or its node alone.

    Args:
        settings: the operator's.
        train: load backbone and rows, and train one step; nothing leaves the machine.
    """
    found = []
    if settings.private_key and settings.root_certificates and settings.superlink:
        if isinstance(settings, SiloSettings) and settings.socket_group:
            found.append(Finding("key", "skipped", f"{settings.private_key}: the node's user reads it, not the worker"))
        else:
            found.append(check_secret("key", settings.private_key))
        found.append(check_certificate("authority", settings.root_certificates, _SILO_RENEWS))
        found += attempt_proxy(settings.superlink, settings.root_certificates)
    else:
        found.append(Finding("connection", "skipped", "no superlink with TLS in the file"))
    found.append(check_port(settings.port))
    found.append(check_disk(settings.folder))
    if isinstance(settings, NodeSettings):
        present = settings.socket_path.is_socket()
        remedy = "" if present else "start the worker (`silotune worker SILO_YAML`)"
        detail = f"{settings.socket_path} is {'there' if present else 'missing'}"
        return [*found, Finding("worker", "ok" if present else "problem", detail, remedy)]
    if settings.secret:
        found.append(check_secret("secret", settings.secret))
    found.append(_order_key(settings))
    found.append(_backbone(settings.backbone, settings.device))
    if train:
        found.append(attempt("dry round", "correct data, backbone or device in the file", lambda: _dry_round(settings)))
    return found


def attempt_proxy(address: str, ca: str) -> list[Finding]:
    """Check the way to the coordinator, if its authority can be read."""
    try:
        return check_proxy(address, Path(ca).read_bytes())
    except OSError as error:
        return [Finding("connection", "skipped", f"{ca}: {error.strerror}")]


def _authority_key(path: Path) -> Finding:
    """The authority's key may be absent, as it should be kept elsewhere; if it is here, no other may read it."""
    try:
        present = path.exists()
    except OSError:
        present = False
    if not present:
        return Finding("authority's key", "ok", "is not on this machine")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Finding("authority's key", "problem", f"{path}: mode {mode:04o}", f"chmod 600 {path}")
    return Finding("authority's key", "ok", f"{path}: mode {mode:04o}; better kept off this machine")


def _order_key(settings: SiloSettings) -> Finding:
    """Who knows the key of the order can solve updates for single rows; the worker makes it with the first run."""
    path = Path(settings.folder) / SECRET_FILE
    if settings.policy.row_order == "seed":
        return Finding("order of rows", "skipped", "the run's seed gives it, which the coordinator knows")
    try:
        present = path.exists()
    except OSError:
        present = True  # `check_secret` says why it cannot be read
    return check_secret("order of rows", path) if present else Finding("order of rows", "ok", f"{path}: not made yet")


def _named(host: str, certificate: Path) -> str:
    names = names_in(certificate)
    if host not in names:
        raise InputError(f"{certificate}: is for {', '.join(names) or 'no host'}, not for {host}")
    return f"{certificate}: is for {', '.join(names)}"


def _backbone(backbone: BackboneConfig, device: str) -> Finding:
    """Load the backbone where runs load it, and tell the hash that the handshake compares."""
    from silotune.models.backbone.loading import load_backbone

    def load() -> str:
        loaded = load_backbone(backbone, device=device)
        return f"{backbone.name} on {loaded.device}, sha256 {loaded.fingerprint}"

    return attempt("backbone", "check backbone and device, and that its files are on this machine", load)


def _dry_round(settings: SiloSettings) -> str:
    """Train one step over this silo's rows, in a folder that is removed."""
    from silotune.data.row_folder import read_rows
    from silotune.runs.run import run

    if settings.data is None:
        assert settings.rows is not None, "the file was checked"
        splits = read_rows(Path(settings.rows), settings.name).splits
        return f"read {len(splits.train)} training rows of a prepared folder; such rows are trained in runs only"
    tree: dict[str, Any] = {
        "silos": [settings.data.model_dump(mode="json", exclude_none=True)],
        "rounds": 1,
        "train": {"steps": 1, "batch_size": 2},
        "backbone": settings.backbone.model_dump(mode="json"),
        "device": settings.device,
    }
    with tempfile.TemporaryDirectory(prefix="silotune-") as folder:
        summary = run(config_of_one(tree), out=Path(folder) / "run").summary
    rows = summary["silos"][settings.name]["rows"]
    return f"trained one step, scored {rows['validation']} validation and {rows['test']} test rows"
