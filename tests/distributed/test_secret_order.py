"""The order of rows at a silo is drawn from a secret of its own, which no coordinator knows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from silotune.core.serialization import read_tensors
from silotune.deploy.doctor import examine_silo
from silotune.distributed.silo.secret import SECRET_FILE, derived_from_secret
from silotune.errors import InputError
from tests.support.malicious import ALLOWED

SEED = {"row_order": "seed"}


def update(attacker, number=1):
    """The numbers of a round's update, whose broadcast is that of the start."""
    reply = attacker.ask("round", number)
    assert reply.kind == "answer", reply.fields
    tensors = read_tensors(reply.blobs["message"])
    return torch.cat([tensor.reshape(-1) for _, tensor in sorted(tensors.items())])


def test_a_secret_is_made_once(tmp_path):
    first = derived_from_secret(tmp_path / "silo", "draws")
    path = tmp_path / "silo" / SECRET_FILE
    assert (len(first), path.stat().st_mode & 0o777) == (32, 0o600)
    assert derived_from_secret(tmp_path / "silo", "draws") == first != derived_from_secret(tmp_path / "other", "draws")
    assert derived_from_secret(tmp_path / "silo", "status") != first
    assert [file.name for file in path.parent.iterdir()] == [SECRET_FILE]
    path.write_bytes(first[:5])
    with pytest.raises(InputError, match=r"secret\.key: damaged; restore it, or remove it"):
        derived_from_secret(tmp_path / "silo", "draws")


def test_the_order_is_the_silos_own(attack, tmp_path):
    attacker = attack(ALLOWED)
    first = update(attacker)
    attacker.restart()
    key = Path(attacker.settings.folder) / SECRET_FILE
    assert torch.equal(update(attacker), first)  # also after a crash
    assert not torch.equal(update(attacker, 2), first)
    again = attack(ALLOWED, run="b" * 16, folder=str(tmp_path / "b"))
    (tmp_path / "b").mkdir()
    shutil.copy(key, tmp_path / "b" / SECRET_FILE)
    assert torch.equal(update(again), first)
    other = attack(ALLOWED, run="c" * 16, folder=str(tmp_path / "c"))
    assert not torch.equal(update(other), first)


def test_dropout_is_drawn_from_the_key(attack, tmp_path):
    words = (*ALLOWED, "train.dropout=0.3", "train.batch_size=60")  # one step, in which the order tells nothing
    policy = {"train_steps": 1}
    updates = [update(attack(words, folder=str(tmp_path / name), policy=policy)) for name in "ab"]
    assert not torch.equal(*updates)


def test_the_doctor_looks_at_the_key(attack):
    attacker = attack(ALLOWED)
    path = Path(attacker.settings.folder) / SECRET_FILE

    def state():
        found = {finding.check: finding.state for finding in examine_silo(attacker.settings, train=False)}
        return found.get("order of rows")

    assert state() is None  # it is made with the first run
    update(attacker)
    assert state() == "ok"
    path.chmod(0o644)
    assert state() == "problem"


def test_seeds_do_not_tell_the_splits(attack, tmp_path, data_folder):
    """Who knows them can search for seeds whose updates, added and subtracted, leave few rows."""
    data = {"path": str(data_folder / "alpha" / "train.jsonl"), "text": "sentence1", "label": "label", "name": "alpha"}
    policy = {"train_rows": 20}

    def digest(name, **settings):
        attacker = attack(ALLOWED, rows=None, data=data, folder=str(tmp_path / name), policy=policy | settings)
        assert attacker.reason("hello") == ""
        return attacker.session._setup.prepared.rows

    assert digest("a") == digest("a")
    assert digest("a") != digest("b")
    assert digest("c", **SEED) == digest("d", **SEED)
