"""Files that Windows' editors saved, with a byte-order mark, and addresses as browsers and mails show them."""

from __future__ import annotations

import codecs
import json

import pytest
import yaml

from silotune.config.trees import load_tree
from silotune.deploy import initialize
from silotune.deploy.nodes import Invitation, invite
from silotune.deploy.settings import read_coordinator_settings, read_silo_or_node_settings
from silotune.distributed.silo.silo_config import read_silo_settings
from silotune.errors import InputError


def mark(path):
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    return path


@pytest.fixture
def silo(tmp_path):
    tree = {
        "name": "north",
        "folder": "state",
        "data": {"path": "rows.csv"},
        "share": [],
        "policy": "trusting",
        "superlink": "localhost:443",
    }
    path = tmp_path / "silo.yaml"
    path.write_text(yaml.safe_dump(tree | {"root_certificates": "ca.pem", "private_key": "silo.key"}))
    return path


@pytest.fixture
def coordinator(tmp_path):
    return initialize.init(tmp_path / "co", "localhost").coordinator


def test_an_invitation_is_read_through_a_byte_order_mark(coordinator, tmp_path):
    path = tmp_path / "north.invite"
    made = invite(read_coordinator_settings(coordinator), "north", path)
    path.write_bytes(path.read_text().encode("utf-16"))
    assert Invitation.read(path) == made
    path.write_text(path.read_bytes().decode("utf-16"))
    assert Invitation.read(mark(path)) == made


def test_every_partys_file_is_read_through_a_byte_order_mark(coordinator, silo):
    expected = read_coordinator_settings(coordinator), read_silo_settings(silo), read_silo_or_node_settings(silo)
    mark(coordinator), mark(silo)
    assert (
        read_coordinator_settings(coordinator),
        read_silo_settings(silo),
        read_silo_or_node_settings(silo),
    ) == expected
    assert load_tree(silo)["name"] == "north"


WRONG = (
    *(" localhost:443", "localhost:443\t", "local host:443", "https://localhost:443", "tcp://localhost:443"),
    *("localhost:443/", "me@localhost:443", "localhost", "localhost:0", "localhost:65536", "localhost:４４３"),
)


@pytest.mark.parametrize("address", WRONG)
def test_what_is_no_address_is_refused_with_what_one_is(coordinator, silo, address, tmp_path):
    silo.write_text(yaml.safe_dump(yaml.safe_load(silo.read_text()) | {"superlink": address}))
    with pytest.raises(InputError, match=r"superlink: .* is not HOST:PORT"):
        read_silo_or_node_settings(silo)
    invite(read_coordinator_settings(coordinator), "north", tmp_path / "a.invite")
    path = tmp_path / "a.invite"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"superlink": address}))
    with pytest.raises(InputError, match="is damaged"):
        Invitation.read(path)
    coordinator.write_text(yaml.safe_dump(yaml.safe_load(coordinator.read_text()) | {"public_address": address}))
    with pytest.raises(InputError, match=r"public_address: .* is not HOST:PORT"):
        read_coordinator_settings(coordinator)


@pytest.mark.parametrize("address", ["localhost:443", "10.0.0.1:9443", "[::1]:443", "a_b.example.org:65535"])
def test_addresses_are_taken(silo, address):
    silo.write_text(yaml.safe_dump(yaml.safe_load(silo.read_text()) | {"superlink": address}))
    assert read_silo_or_node_settings(silo).superlink == address
