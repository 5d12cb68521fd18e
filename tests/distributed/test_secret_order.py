"""The order of rows at a silo: drawn from a key of its own, the same in all rounds, so that updates tell no rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from silotune.core.randomness import generator
from silotune.core.serialization import read_tensors
from silotune.deploy.doctor import _order_key
from silotune.distributed.silo.own_keys import ORDER_KEY, own_key
from silotune.errors import InputError
from silotune.training.row_draws import RowDraws
from tests.support.malicious import ALLOWED

SEED = {"row_order": "seed"}


def update(attacker, number=1):
    """The numbers of a round's update, whose broadcast is that of the start."""
    reply = attacker.ask("round", number)
    assert reply.kind == "answer", reply.fields
    return flat(read_tensors(reply.blobs["message"]))


def flat(tensors):
    """All numbers, by name."""
    return torch.cat([tensor.reshape(-1) for _, tensor in sorted(tensors.items())])


def test_a_key_is_made_once(tmp_path):
    key = own_key(tmp_path / "silo", ORDER_KEY)
    path = tmp_path / "silo" / ORDER_KEY
    assert (len(key), path.stat().st_mode & 0o777) == (32, 0o600)
    assert own_key(tmp_path / "silo", ORDER_KEY) == key != own_key(tmp_path / "other", ORDER_KEY)
    assert [file.name for file in path.parent.iterdir()] == [ORDER_KEY]
    path.write_bytes(key[:5])
    with pytest.raises(InputError, match=r"order\.key: damaged; restore it, or remove it"):
        own_key(tmp_path / "silo", ORDER_KEY)


def test_the_order_is_the_silos_own(attack, tmp_path):
    attacker = attack(ALLOWED)
    first = update(attacker)
    attacker.restart()
    key = Path(attacker.settings.folder) / ORDER_KEY
    assert torch.equal(update(attacker, 2), first)  # also after a crash, and in every round
    again = attack(ALLOWED, run="b" * 16, folder=str(tmp_path / "b"))
    (tmp_path / "b").mkdir()
    shutil.copy(key, tmp_path / "b" / ORDER_KEY)
    assert torch.equal(update(again), first)
    other = attack(ALLOWED, run="c" * 16, folder=str(tmp_path / "c"))
    assert not torch.equal(update(other), first)


def test_the_order_of_the_seed_where_the_operator_says_so(attack, tmp_path):
    seeded = [attack(ALLOWED, folder=str(tmp_path / name), policy=SEED) for name in "ab"]
    first, second = map(update, seeded)
    assert torch.equal(first, second)
    assert not (tmp_path / "a" / ORDER_KEY).exists()
    assert not torch.equal(update(seeded[0], 2), first)


def test_two_dropout_rates_have_masks_of_their_own(attack):
    """With the masks of one draw, two rates that differ by little differ by one element of one row."""
    words, rates = (*ALLOWED, "tuner=lora", "train.optimizer=sgd", "train.dropout=0.3"), (0.1, 0.1 + 1e-9)
    first = attack((*words, f"tuner.dropout={rates[0]}"))
    second = attack((*words, f"tuner.dropout={rates[1]}"), run="b" * 16, folder=first.settings.folder)
    start = flat(read_tensors(first.broadcast()))
    one, two = (update(attacker) - start for attacker in (first, second))
    assert float((one - two).norm()) > 0.01 * float(one.norm())
    first.restart()
    assert torch.equal(update(first) - start, one)


def test_dropout_is_drawn_from_the_key(attack, tmp_path):
    words = (*ALLOWED, "train.dropout=0.3", "train.batch_size=60")  # one step, in which the order tells nothing
    policy = {"row_steps": 0}
    updates = [update(attack(words, folder=str(tmp_path / name), policy=policy)) for name in "ab"]
    assert not torch.equal(*updates)
    key, other = (RowDraws.secret(own_key(tmp_path / name, ORDER_KEY), "") for name in "ab")
    assert key.seed != other.seed


def test_purposes_of_an_order():
    secret, seeded = RowDraws(1, same_order=True), RowDraws(1)
    assert secret.order("a", 1, "train", 0, True) == secret.order("a", 2, "other", 0, True)
    assert secret.order("a", 1, "train", 0, True) != secret.order("a", 1, "train", 1, True)
    assert secret.order("a", 1, "train", 0, False) != secret.order("a", 2, "train", 0, False)
    assert seeded.order("a", 1, "train", 0, True) == ("a", 1, "train", 0)  # as ever


def test_the_doctor_looks_at_the_key(attack):
    attacker = attack(ALLOWED)
    path = Path(attacker.settings.folder) / ORDER_KEY
    assert "not made yet" in _order_key(attacker.settings).detail
    update(attacker)
    assert _order_key(attacker.settings).state == "ok"
    path.chmod(0o644)
    assert _order_key(attacker.settings).state == "problem"
    assert _order_key(attack(ALLOWED, policy=SEED).settings).state == "skipped"


ANY = {"batches": "any", "effective_rows": 0}
"""With the watch on single updates some of ninety are withheld, which is not looked at here."""

LINEAR = ("fedavg", "method.adapters=1", "head=linear", "tuner.r=1", "rounds=90", "train.batch_size=8",
          "train.optimizer=sgd", "train.lr=0.001", "train.epochs=1")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("policy", "told"), [(SEED | ANY, 60), (ANY, 1)])
def test_rounds_with_the_same_broadcast(attack, policy, told):
    """With known orders as many updates as rows are equations for each row's gradient; a secret order gives one."""
    attacker, rows = attack(LINEAR, policy=policy), 60
    phase, seed = attacker.federation.context.phases[0].name, attacker.federation.config.seed
    moved = read_tensors(attacker.broadcast(add=0.1))
    start = torch.cat([tensor.reshape(-1) for _, tensor in sorted(moved.items())])
    changes, weights = [], torch.zeros(90, rows, dtype=torch.float64)
    for number in range(1, 91):
        reply = attacker.ask("round", number, broadcast=attacker.broadcast(number, add=0.1))
        tensors = read_tensors(reply.blobs["message"])
        changes.append(torch.cat([tensor.reshape(-1) for _, tensor in sorted(tensors.items())]) - start)
        order = torch.randperm(rows, generator=generator(seed, "batches", "alpha", number, phase, 0))
        for chosen in order.split(8):
            weights[number - 1, chosen] = 1 / len(chosen)
    assert int(torch.linalg.matrix_rank(weights)) == rows  # what the coordinator believes
    different = {change.numpy().tobytes() for change in changes}
    assert min(len(different), rows) == told


def test_seeds_do_not_tell_the_splits(attack, tmp_path, data_folder):
    """Who knows them can search for seeds whose updates, added and subtracted, leave few rows."""
    data = {"path": str(data_folder / "alpha" / "train.jsonl"), "text": "sentence1", "label": "label", "name": "alpha"}
    policy = {"train_rows": 20, "scored_rows": 5, "row_steps": 0}

    def digest(name, **settings):
        attacker = attack(ALLOWED, rows=None, data=data, folder=str(tmp_path / name), policy=policy | settings)
        assert attacker.reason("hello") == ""
        return attacker.session._setup.rows_digest

    assert digest("a") == digest("a")
    assert digest("a") != digest("b")
    assert digest("c", **SEED) == digest("d", **SEED)
