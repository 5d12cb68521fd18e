"""A run leaves no more on a silo's disk than its operator's policy allows; what is too much is not written."""

from __future__ import annotations

import pytest

from silotune.distributed.silo.disk_room import DiskRoom, used
from silotune.distributed.silo.policy import Policy, PolicyRefused
from silotune.distributed.silo.policy_config import PolicyConfig
from silotune.distributed.silo.state_store import StateStore
from tests.support.malicious import ALLOWED, RUN


def room(folder, **limits):
    return DiskRoom(Policy("a", PolicyConfig.of("lab").model_copy(update=limits)), folder).check


def test_a_runs_folder_and_all_of_them(tmp_path):
    (tmp_path / RUN / "deep").mkdir(parents=True)
    (tmp_path / RUN / "deep" / "file").write_bytes(bytes(700_000))
    (tmp_path / ("1" * 16)).mkdir()
    (tmp_path / ("1" * 16) / "file").write_bytes(bytes(300_000))
    (tmp_path / "audit.jsonl").write_bytes(bytes(10**7))  # no run's
    assert used(tmp_path / RUN) == 700_000
    room(tmp_path)(tmp_path / RUN, 10**12)
    room(tmp_path, disk_mib=1)(tmp_path / RUN, 2**20 - 700_000)
    with pytest.raises(PolicyRefused, match=r"more files of this run .* at most 1 MiB .policy.disk_mib."):
        room(tmp_path, disk_mib=1)(tmp_path / RUN, 2**20 - 700_000 + 1)
    room(tmp_path, disk_mib_in_all=1)(tmp_path / RUN, 2**20 - 10**6)
    with pytest.raises(PolicyRefused, match=r"policy\.disk_mib_in_all"):
        room(tmp_path, disk_mib_in_all=1)(tmp_path / RUN, 2**20 - 10**6 + 1)


def test_a_state_that_replaces_one_counts_its_difference(tmp_path):
    import torch

    store = StateStore(tmp_path, RUN, room(tmp_path, disk_mib=1))
    for _ in range(3):
        store.write("0001", {"x": torch.zeros(200_000)})
    with pytest.raises(PolicyRefused):
        store.write("0002", {"x": torch.zeros(200_000)})
    assert [path.name for path in store.path.iterdir()] == ["0001.safetensors"]


def test_a_full_folder_ends_training_and_tests_before_they_begin(attack, monkeypatch):
    coordinator = attack(ALLOWED, policy={"disk_mib": 1})
    folder = coordinator.session._setup.limits.ledger.folder / RUN
    folder.mkdir(parents=True)
    (folder / "kept").write_bytes(bytes(2**20))
    assert "policy.disk_mib)" in coordinator.reason("round")
    assert not (folder.parent / "requests.jsonl").exists()  # nothing was worked on
    assert "policy.disk_mib)" in coordinator.reason("score", 0, splits=["validation", "test"])
    assert {path.name for path in folder.iterdir()} <= {"kept", "rows.json"}
