"""A node whose coordinator's certificate fails ends with its own code; started after a renewal, it is back."""

from __future__ import annotations

import shutil

import pytest

from silotune.deploy.processes import LinkLost
from tests.support.deployed import Deployed, authority, key

pytestmark = pytest.mark.long


@pytest.fixture
def deployed(tmp_path):
    made = Deployed(tmp_path)
    yield made
    made.end()


def serve(deployed: Deployed, folder) -> None:
    """Give the coordinator the certificate of a folder, as `federation renew` does, and wait until `up` has it."""
    said = "the SuperLink has the new one"
    before = deployed.said("up").count(said)
    for name in ("server.key", "server.pem"):
        shutil.copy(folder / name, deployed.tls / name)
    deployed.until(lambda: deployed.said("up").count(said) > before, "up")


def test_a_node_is_back_after_a_renewal(deployed: Deployed, tmp_path) -> None:
    shutil.copytree(deployed.tls, tmp_path / "good")
    authority(tmp_path / "other")  # stands for a certificate that has expired
    deployed.begin("up", "federation", "up", deployed.link)
    deployed.until(lambda: "SuperLink on" in deployed.said("up"), "up")
    assert deployed.command("federation", "admit", deployed.link, "north", key(tmp_path / "key")).returncode == 0
    tree = {
        "name": "north",
        "folder": "node",
        "socket": "w.sock",
        "superlink": f"localhost:{deployed.port}",
        "private_key": "key",
    }
    file = deployed.write("node.yaml", tree | {"root_certificates": "tls/ca.pem"})
    deployed.begin("node", "federation", "join", file)
    deployed.until(lambda: deployed.online() == ["north"], "node")

    serve(deployed, tmp_path / "other")
    assert deployed.begun["node"].wait(240) == LinkLost.exit_code
    deployed.begin("node", "federation", "join", file)  # as systemd does
    assert deployed.begun["node"].wait(240) == 2
    status = deployed.command("federation", "status", file, "--check")
    assert (status.returncode, "link: down since" in status.stdout) == (1, True)

    serve(deployed, tmp_path / "good")
    deployed.begin("node", "federation", "join", file)
    deployed.until(lambda: deployed.online() == ["north"], "node")
    assert deployed.command("federation", "status", file, "--check").returncode == 0
