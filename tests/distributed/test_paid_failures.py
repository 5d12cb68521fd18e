"""A failure after noise was drawn costs what the answer would have cost, is kept, and says nothing of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from silotune.communication.messages import broadcast_message
from silotune.distributed.silo import local_work
from silotune.distributed.silo.local_work import LocalWork
from silotune.distributed.silo.policy import WorkRefused
from silotune.distributed.silo.session import Session
from silotune.errors import Diverged
from silotune.training.client import SiloClient
from tests.distributed.test_row_ledger import NOISE, charges
from tests.support.masks import secure_silos

ROUNDS = SiloClient.rounds


def raised(error):
    def fail(*_, **__):
        raise error

    return fail


def after_training(error):
    return lambda *a: raised(error)(ROUNDS(*a))


def changed(**changes):
    return lambda *a: [replace(reply, **changes) for reply in ROUNDS(*a)]


EXITS = {
    "an exception": (SiloClient, "rounds", after_training(ValueError("row 17"))),
    "too slow": (SiloClient, "rounds", after_training(WorkRefused("too long"))),
    "diverged": (SiloClient, "rounds", after_training(Diverged("infinite"))),
    "not finite": (SiloClient, "rounds", changed(norm=float("inf"))),
    "too large": (local_work, "message_numbers", raised(WorkRefused("too many numbers"))),
    "no summand": (SiloClient, "rounds", changed(message=b"")),
    "the check": (LocalWork, "_check_update", raised(MemoryError())),
    "the status": (Session, "_status", raised(RuntimeError("row 17"))),
}
OF_SUMMANDS = ("an exception", "no summand", "the status")
"""Exits of `make test` under masks: before a summand is there, without one, and after it."""


@pytest.mark.parametrize(
    ("secure", "name"),
    [
        pytest.param(secure, name, marks=pytest.mark.long if secure and name not in OF_SUMMANDS else ())
        for secure in (False, True)
        for name in EXITS
    ],
)
def test_every_exit_after_the_draw_is_paid_once_and_stays(secure, name, attack, tiny_config, tmp_path, monkeypatch):
    fields = {"policy": {"preset": "private"}, "privacy": {"epsilon": 8.0}, "share": ["status"]}
    words = ("fedavg", "tuner.r=1", *NOISE)
    if secure:
        words = (*words, "aggregation.secure=true", "aggregation=uniform")
        fields["masked"] = secure_silos(tiny_config(*words), tmp_path / "own")["alpha"].masked.model_dump()
    attacker = attack(words, caps=False, **fields)
    folder = attacker.session.store.folder
    with monkeypatch.context() as patch:
        patch.setattr(*EXITS[name])
        first = attacker.ask("round")
    assert (first.kind, first.fields) == ("failed", {"silo": "alpha", "reason": "see the worker's log"})
    assert len(charges(folder)) == 1
    attacker.restart()
    again = attacker.ask("round")
    assert (again.kind, again.fields["reason"]) == (first.kind, first.fields["reason"])
    assert len(charges(folder)) == 1
    assert attacker.ask("round", broadcast=attacker.broadcast(add=1e-3)).kind == "answer"
    assert len(charges(folder)) == 2


def test_a_threshold_on_the_noised_gradient_is_no_free_query(attack):
    """The attack: a bias near the largest number overflows exactly if its noised gradient is negative."""
    words = ("fedavg", "tuner.r=1", *NOISE, "train.optimizer=sgd", "train.lr=1e33", "head.scope=shared",
             "train.steps=1", "data.tasks=[alpha]")  # fmt: skip
    policy = {"preset": "private", "requests_per_round": None}
    attacker = attack((*words, "privacy.epsilon=1"), caps=False, policy=policy, privacy={"epsilon": 800.0})
    shared, kinds = attacker.federation.coordinator.shared, []
    while not {"failed", "answer"} <= {*kinds} and len(kinds) < 200:  # one of 14 fails, by a secret draw
        moved = {part: {key: tensor.clone() for key, tensor in each.items()} for part, each in shared.items()}
        bias = next(t for each in moved.values() for key, t in each.items() if key.endswith("out.bias"))
        bias[0], bias[1] = torch.finfo(torch.float32).max, len(kinds) * 1e-3
        kinds.append(attacker.ask("round", broadcast=broadcast_message(moved, 1)).kind)
    assert {*kinds} == {"failed", "answer"}
    assert len(charges(attacker.session.store.folder)) == len(kinds)


def test_noise_on_changes_is_paid_by_a_failure_too(attack, tmp_path, monkeypatch):
    secret = tmp_path / "secret.key"
    secret.write_bytes(b"s" * 32)
    words = ("fedavg", "tuner.r=1", "rounds=2", "train.steps=1", "uplink=clip,laplace", "uplink.epsilon=2")
    attacker = attack(words, policy={"numbers_per_round": "10%", "train_steps": 1}, secret=str(secret), epsilon=100.0)
    with monkeypatch.context() as patch:
        patch.setattr(*EXITS["not finite"])
        first = attacker.ask("round")
    assert (first.kind, attacker.ask("round")) == ("failed", first)
    assert len(attacker.session.store.records.rows("SELECT * FROM released")) == 1
