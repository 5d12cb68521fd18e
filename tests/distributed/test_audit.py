"""What the records of silos and coordinator say equals the capture of the wire, message by message."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import suppress

import pytest

from silotune.core.records import FILE, check_audit
from silotune.core.serialization import read_tensors
from silotune.core.tensors import change_of, total_norm
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.session import Session
from silotune.errors import InputError
from tests.support.malicious import ALLOWED
from tests.support.session_rig import federate, local_configs


@pytest.fixture(scope="module")
def federated(tiny_config, tmp_path_factory):
    """Folder and link of a noised run; the messages of each of its three silos are in the link."""
    out = tmp_path_factory.mktemp("audited") / "run"
    words = ("rounds=2", "train.steps=1", "uplink=clip,laplace", "uplink.epsilon=4", "privacy.epsilon=100")
    return out, federate(tiny_config("fedmcp", *words), out)[1]


def digest(data):
    return hashlib.sha256(data).hexdigest()


def test_the_record_of_a_silo_equals_the_wire(federated):
    out, link = federated
    for node, name in enumerate(("alpha", "beta", "gamma")):
        entries, problems = check_audit(out / "checkpoints" / "silos" / name)
        wire = [data for sender, data in link.came if sender == node]
        assert problems == []
        assert [(entry["sha256"], entry["bytes"]) for entry in entries] == [(digest(d), len(d)) for d in wire]
        assert [entry["kind"] for entry in entries] == [decode(data).kind for data in wire]
        assert [entry["kind"] for entry in entries].count("answer") == 2
        assert {entry["epsilon"] for entry in entries if entry["kind"] == "answer"} == {4.0}


def test_shapes_numbers_and_norm_are_those_of_the_message(tiny_config, tmp_path):
    _, link = federate(tiny_config("fedmcp", "rounds=1", "train.steps=1"), tmp_path / "run")
    entries, _ = check_audit(tmp_path / "run" / "checkpoints" / "silos" / "alpha")
    (said,) = [entry for entry in entries if entry["kind"] == "answer"]
    (sent,) = [decode(data) for node, data in link.sent if node == 0 and decode(data).kind == "round"]
    (came,) = [decode(data) for node, data in link.came if node == 0 and decode(data).kind == "answer"]
    before, after = read_tensors(sent.blobs["broadcast"]), read_tensors(came.blobs["message"])
    assert said["tensors"] == {name: list(tensor.shape) for name, tensor in after.items()}
    assert said["numbers"] == sum(tensor.numel() for tensor in after.values())
    assert said["norm"] == pytest.approx(total_norm(change_of(before, after).values(), "l2"))
    assert said["norm"] > 0
    assert (said["run"], said["round"]) == (sent.fields["run"], 1)


def test_the_record_of_the_coordinator_equals_the_wire(federated):
    out, link = federated
    entries, problems = check_audit(out / "federation")
    assert problems == []
    for direction, wire in (("sent", link.sent), ("came", link.came)):
        said = [(entry["node"], entry["sha256"]) for entry in entries if entry.get("direction") == direction]
        assert sorted(said) == sorted((str(node), digest(data)) for node, data in wire)
    assert [entry["kind"] for entry in entries if "sha256" not in entry] == ["started", *["joined"] * 3, "ended"]


def test_refused_and_malformed_requests_are_in_the_record(tiny_config, tmp_path):
    settings = next(iter(local_configs(tiny_config("fedmcp"), tmp_path / "run").values()))
    replies = [Session(settings).answer(data) for data in (b"nonsense", b"", b"SLT1\0\0\0\2{}")]
    entries, _ = check_audit(tmp_path / "run" / "checkpoints" / "silos" / "alpha")
    assert [entry["sha256"] for entry in entries] == [digest(reply) for reply in replies]
    assert {entry["kind"] for entry in entries} == {"failed"}


def test_nothing_leaves_that_cannot_be_recorded(tiny_config, tmp_path):
    settings = next(iter(local_configs(tiny_config("fedmcp"), tmp_path / "run").values()))
    session = Session(settings)
    session.answer(b"nonsense")
    session.store.records.close()
    (tmp_path / "run" / "checkpoints" / "silos" / "alpha" / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match="nothing leaves"):
        Session(settings).answer(b"nonsense")


def test_the_commands_sum_up_and_find_a_changed_line(federated, silotune, tmp_path):
    out, link = federated
    folder = shutil.copytree(out / "checkpoints" / "silos" / "beta", tmp_path / "beta")
    (tmp_path / "silo.yaml").write_text(
        json.dumps({"name": "beta", "folder": str(folder), "rows": str(tmp_path), "share": [], "policy": "trusting"}),
        encoding="utf-8",
    )
    words = ("silo", "audit", "--config", str(tmp_path / "silo.yaml"))
    done = silotune(*words, "--json")
    (total,) = json.loads(done.out)["runs"].values()
    wire = [data for node, data in link.came if node == 1]
    assert (total["messages"], total["bytes"], total["rounds"]) == (len(wire), sum(map(len, wire)), 2)
    assert total["epsilon"] == 8
    assert silotune("federation", "audit", str(out)).code == 0
    with sqlite3.connect(folder / FILE) as connection:
        connection.execute("UPDATE audit SET line = replace(line, '\"bytes\": ', '\"bytes\": 1') WHERE number = 1")
    done = silotune(*words)
    assert done.code == 1
    assert "line 2: line 1 before it was changed" in done.err


def test_refusals_do_not_fill_the_disk(attack):
    """Each has a line, and a coordinator can ask without end."""
    attacker = attack(ALLOWED, policy={"disk_mib": 1})
    assert attacker.reason("round", 9)
    with attacker.session.store.records.transaction() as connection:
        connection.execute("CREATE TABLE filled (bytes BLOB)")
        left = 2**20 - sum(file.stat().st_size for file in attacker.session.store.folder.rglob("*") if file.is_file())
        connection.execute("INSERT INTO filled VALUES (zeroblob(?))", (left - 40_000,))
    replies = 1
    with suppress(InputError):  # nothing leaves any more
        while replies < 99:
            assert attacker.reason("round", 9)
            replies += 1
    assert 3 < replies < 99
    with pytest.raises(InputError, match=r"its policy refuses more files of runs; .*\(policy\.disk_mib\)"):
        attacker.reason("round", 9)
