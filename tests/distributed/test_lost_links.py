"""Nodes that lose their coordinator come back by themselves: after an expired certificate, and after a cut."""

from __future__ import annotations

import shutil
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.hashes import SHA256

from silotune.deploy.processes import LinkLost
from tests.support.deployed import Deployed, key
from tests.support.proxies import PROXIES, proxy_to

pytestmark = pytest.mark.long

RESTART = "while :; do {python} -m silotune federation join {file}; echo ended with code $?; sleep 1; done"
"""What `Restart=always` of the node's unit does."""

HOST = "coordinator.example"
"""A name that only the proxy knows."""


def expiring(tls: Path, seconds: float) -> bytes:
    """Return the coordinator's certificate, signed anew for so many seconds."""
    old = x509.load_pem_x509_certificate((tls / "server.pem").read_bytes())
    builder = x509.CertificateBuilder(
        old.issuer, old.subject, old.public_key(), x509.random_serial_number(), old.not_valid_before_utc,
        datetime.now(UTC) + timedelta(seconds=seconds), list(old.extensions),
    )  # fmt: skip
    signer = serialization.load_pem_private_key((tls / "ca.key").read_bytes(), None)
    return builder.sign(signer, SHA256()).public_bytes(serialization.Encoding.PEM)


def renewals(deployed: Deployed) -> int:
    return deployed.said("up").count("the SuperLink has the new one")


def admitted(deployed: Deployed, address: str) -> Path:
    """Start the coordinator, let `north` in, and write its node's file."""
    deployed.begin("up", "federation", "up", deployed.link)
    deployed.until(lambda: "SuperLink on" in deployed.said("up"), "up")
    public = key(deployed.folder / "key")
    assert deployed.command("federation", "admit", deployed.link, "north", public).returncode == 0
    tree = {"name": "north", "folder": "node", "socket": "w.sock", "superlink": address, "private_key": "key"}
    return deployed.write("node.yaml", tree | {"root_certificates": "tls/ca.pem"})


@pytest.fixture
def made(tmp_path):
    deployed = Deployed(tmp_path, host=HOST)
    yield deployed
    deployed.end()


def test_a_certificate_expires_and_is_renewed_without_a_touch_at_the_node(made: Deployed, tmp_path, capsys) -> None:
    certificate, good = made.tls / "server.pem", tmp_path / "good.pem"
    shutil.copy(certificate, good)
    file = admitted(made, f"localhost:{made.port}")
    made.begin("node", "bash", "-c", RESTART.format(python=sys.executable, file=file))
    made.until(lambda: made.online() == ["north"], "node")
    assert made.command("federation", "status", file, "--check").returncode == 0

    expires = time.monotonic() + 40
    certificate.write_bytes(expiring(made.tls, 40))
    made.until(lambda: renewals(made) == 1, "up")
    made.until(lambda: time.monotonic() > expires + 2, "up")
    made.begun["up"].terminate()  # connections that live on do not look at the certificate again
    made.begun["up"].wait(60)
    made.begin("up", "federation", "up", made.link)
    made.until(lambda: f"ended with code {LinkLost.exit_code}" in made.said("node"), "node")
    lost = time.monotonic() - expires
    status = made.command("federation", "status", file, "--check")
    assert (status.returncode, "link: down since" in status.stdout) == (1, True)
    made.until(lambda: "certificate has expired" in made.said("node"), "node")

    shutil.copy(good, certificate)
    renewed = time.monotonic()
    made.until(lambda: renewals(made) == 2, "up")
    made.until(lambda: made.online() == ["north"], "node")
    back = time.monotonic() - renewed
    made.until(lambda: made.command("federation", "status", file, "--check").returncode == 0, "node")
    with capsys.disabled():
        print(f"\ncode {LinkLost.exit_code} {lost:.0f} s after the expiry, online {back:.0f} s after the renewal")


def test_a_node_behind_a_proxy_with_a_password_outlives_a_cut_of_a_minute(made: Deployed, monkeypatch, capsys) -> None:
    asked: list[str] = []
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    with proxy_to(made.port, asked) as address:
        monkeypatch.setenv("https_proxy", f"http://me:secret@{address}")
        file = admitted(made, f"{HOST}:443")
        made.begin("node", "federation", "join", file)
        made.until(lambda: made.online() == ["north"], "node")
        assert {*asked} == {f"{HOST}:443"}, "what goes to this machine goes through no proxy"
        assert made.command("federation", "status", file, "--check").returncode == 0
    cut = time.monotonic()
    made.until(lambda: made.command("federation", "status", file, "--check").returncode == 1, "node")
    seen = time.monotonic() - cut
    made.until(lambda: time.monotonic() > cut + 60 and made.online() == [], "node")
    with proxy_to(made.port, asked, int(address.rpartition(":")[2])):
        joined = time.monotonic()
        made.until(lambda: made.online() == ["north"], "node")
        back = time.monotonic() - joined
        made.until(lambda: made.command("federation", "status", file, "--check").returncode == 0, "node")
    assert "secret" not in made.said("node")
    with capsys.disabled():
        print(f"\nthe cut was in `status` after {seen:.0f} s; online {back:.0f} s after its end")
