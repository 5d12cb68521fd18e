"""Caps of a silo's policy: what they refuse, that nothing rewinds them, and that no honest run notices them."""

from __future__ import annotations

import time

import pytest
import yaml

from silotune.config import dump
from silotune.distributed.silo import policy as policy_module
from silotune.distributed.silo.silo_config import read_silo_settings
from silotune.training import client
from tests.support.malicious import ALLOWED, CAPS
from tests.support.session_rig import federate

ADD = 1e-6
"""A step between broadcasts that makes their requests different ones."""


@pytest.mark.parametrize(
    ("words", "policy", "refused"),
    [
        (("fedavg", "tuner=full"), {}, "numbers in an update; at most"),
        (ALLOWED, {"numbers_per_round": 100}, "numbers in an update; at most 100 (policy.numbers_per_round)"),
        ((*ALLOWED, "rounds=201"), {}, "201 rounds; at most 200 (policy.rounds)"),
        (ALLOWED, {"train_rows": 61}, "a training split of so few rows; at least 61 (policy.train_rows)"),
        ((*ALLOWED, "train.steps=3"), {}, "an update of so few steps; at least 4 (policy.train_steps)"),
    ],
)
def test_a_run_beyond_a_cap_is_refused_by_its_key(attack, words, policy, refused):
    attacker = attack(words, policy=policy)
    for kind in ("hello", "round", "score"):
        attacker.restart()
        reply = attacker.ask(kind)
        assert (reply.kind, reply.blobs) == ("refused", {})
        assert refused in reply.fields["reason"]


@pytest.mark.parametrize(
    ("policy", "ask", "allowed", "refused"),
    [
        ({"requests_in_all": 3}, "score", 3, "4 requests in all; at most 3 (policy.requests_in_all)"),
        ({}, "round", 3, "4 requests for round 1; at most 3 (policy.requests_per_round)"),
        ({"numbers_in_all": 300}, "round", 1, "numbers in all updates; at most 300 (policy.numbers_in_all)"),
    ],
)
def test_requests_beyond_a_cap_are_refused_after_any_restart(attack, policy, ask, allowed, refused):
    """Each has another broadcast: an oracle for any model. What was answered before is answered again."""
    attacker = attack(ALLOWED, policy=policy)
    asked = [attacker.broadcast(add=step * ADD) for step in range(allowed + 1)]
    assert [attacker.reason(ask, broadcast=each) for each in asked[:allowed]] == [""] * allowed
    assert refused in attacker.reason(ask, broadcast=asked[allowed])
    attacker.restart()
    assert refused in attacker.reason(ask, broadcast=asked[allowed])
    assert attacker.reason(ask, broadcast=asked[allowed - 1]) == ""


@pytest.mark.long
def test_new_names_and_seeds_do_not_rewind(attack):
    policy = {"requests_in_all": 3}
    for number, name in enumerate("abcd"):
        reason = attack((*ALLOWED, f"seed={number + 1}"), run=name * 16, policy=policy).reason()
        assert ("requests_in_all" in reason) is (number == 3)
    assert "requests_in_all" in attack(ALLOWED, run="e" * 16, policy=policy).reason("final")


@pytest.mark.parametrize("number", [-1, 0, 4, 10**30])
def test_rounds_that_the_run_does_not_have(attack, number):
    """Round 0 is scored, and never trained: under `train.schedule_over=run` its rates would be negative."""
    attacker = attack(ALLOWED)
    for kind in ("round", "final", *(["score"] if number else [])):
        reply = attacker.ask(kind, number)
        assert reply.kind in ("refused", "failed")
        assert "the run has 3" in reply.fields["reason"] or number not in (0, 4)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"policy": "trusting"}, "unknown key 'policy'"),
        ({"share": ["validation"]}, "unknown key 'share'"),
        ({"attack": {"name": "backdoor", "target": "good"}}, "attack: simulated"),
        ({"description": "x" * 300_000}, "a configuration of 30"),
        ({"evaluation__test_time": True}, "evaluation.test_time"),
    ],
)
def test_keys_that_a_coordinator_puts_in(attack, changes, refused):
    assert refused in attack(ALLOWED, changes=changes).reason("hello")


def test_a_split_that_no_silo_scores(attack):
    attacker = attack(ALLOWED)
    for splits in (["train"], ["train", "validation"], ["validation", "../x"], [], ["test"] * 9):
        reply = attacker.ask("score", splits=splits)
        assert (reply.kind, "no such splits" in reply.fields["reason"]) == ("failed", True)


def test_a_request_ends_at_its_time_and_memory(attack, monkeypatch):
    attacker = attack(ALLOWED, policy={"seconds": 5})
    assert attacker.reason("hello") == ""
    now = time.monotonic()
    monkeypatch.setattr(policy_module.time, "monotonic", lambda: now)
    training = attacker.session._setup.guard.begin
    monkeypatch.setattr(attacker.session._setup.guard, "begin", lambda: (training(), later(now + 6)))

    def later(then):
        monkeypatch.setattr(policy_module.time, "monotonic", lambda: then)

    assert "a request of so many seconds; at most 5 (policy.seconds)" in attacker.reason()
    monkeypatch.undo()
    assert attack(ALLOWED).reason("round", 2) == ""
    monkeypatch.setattr(policy_module, "memory_mib", lambda: 20_000)
    assert "so much memory; at most 16,384 MiB" in attack(ALLOWED).reason("round", 3)


def test_a_full_disk_ends_training_and_tests_before_they_begin(attack):
    attacker = attack(ALLOWED, policy={"disk_mib": 1})
    folder = attacker.session.store.folder / ("1" * 16)
    folder.mkdir(parents=True)
    (folder / "kept").write_bytes(bytes(2**20))
    assert "more files of runs; at most 1 MiB; remove finished runs' folders (policy.disk_mib)" in attacker.reason()
    assert "policy.disk_mib)" in attacker.reason("score", 0, splits=["validation", "test"])
    (folder / "kept").unlink()
    assert attacker.reason() == ""


def test_a_request_over_a_state_that_changed_counts_again(attack):
    """Two requests in turn, each from the state that the other left: every answer is new, though the words repeat."""
    attacker = attack(ALLOWED)
    assert attacker.reason() == ""
    broadcasts = [attacker.broadcast(add=1e-3), attacker.broadcast()]
    replies = [attacker.ask("round", base="0001", broadcast=broadcasts[turn % 2]) for turn in range(5)]
    assert len({reply.blobs["message"] for reply in replies if reply.kind == "answer"}) == 2
    assert "requests for round 1; at most 3" in replies[-1].fields["reason"]


def test_a_broadcast_of_another_round(attack):
    """It would choose the order of rows: that of one round, for as many requests as the run has rounds."""
    attacker = attack(ALLOWED)
    for kind in ("round", "score", "final"):
        reason = attacker.reason(kind, 2, broadcast=attacker.broadcast(number=1))
        assert "a broadcast of round 1 in a request for round 2" in reason


def test_a_refused_request_deletes_nothing(attack):
    attacker = attack(ALLOWED)
    assert attacker.reason() == ""
    kept = attacker.ask("round")
    assert attacker.reason("round", 4)  # the run has three
    attacker.restart()
    assert attacker.ask("round") == kept


def test_a_request_is_counted_before_it_is_worked_on(attack, monkeypatch):
    """A worker that is killed again and again as it answers must not forget."""
    attacker = attack(ALLOWED)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("silotune.training.client.SiloClient.rounds", killed)
    for step in range(3):
        with pytest.raises(KeyboardInterrupt):
            attacker.ask("round", broadcast=attacker.broadcast(add=step * ADD))
    monkeypatch.undo()
    assert "policy.requests_per_round" in attacker.reason(broadcast=attacker.broadcast(add=1e-3))


def test_an_update_that_is_not_finite_does_not_leave(attack, monkeypatch):
    """Which of its numbers are not would tell rows."""
    attacker = attack(ALLOWED)
    monkeypatch.setattr(client, "_norm", lambda _: float("nan"))
    reply = attacker.ask("round")
    assert (reply.kind, "the update is not finite" in reply.fields["reason"]) == ("failed", True)
    assert not reply.blobs


def test_what_leaves_is_measured_not_promised(attack, monkeypatch):
    """A message that is larger than the shared parts are does not leave, whatever made it."""
    attacker = attack(ALLOWED, policy={"numbers_per_round": 600})
    assert attacker.reason("hello") == ""
    monkeypatch.setattr("silotune.distributed.silo.local_work.message_numbers", lambda _: 601)
    reply = attacker.ask("round")
    assert (reply.kind, reply.blobs) == ("refused", {})
    assert "601 numbers in an update; at most 600" in reply.fields["reason"]


def test_an_honest_run_is_what_it_was(tiny_config, in_one_process, tmp_path):
    words = (*ALLOWED, "sampling.count=2", "rounds=2")
    config, expected = tiny_config(*words), in_one_process(*words).summary
    summary, _ = federate(config, tmp_path / "run", policy=CAPS | {"row_order": "seed"})
    assert summary["shared_sha256"] == expected["shared_sha256"]
    assert summary["silos"] == expected["silos"]


def test_a_preset_and_its_keys(tmp_path):
    """`test_deployment.py` has what is refused."""
    path, policy = tmp_path / "silo.yaml", {"preset": "private", "rounds": 3}
    tree = {"name": "north", "folder": "f", "data": {"path": "d.csv"}, "share": [], "privacy": {"epsilon": 8}}
    path.write_text(yaml.safe_dump(tree | {"policy": policy}))
    settings = read_silo_settings(path)
    assert (settings.policy.rounds, settings.policy.seconds, settings.privacy.unit) == (3, 86_400, "row")


def test_caps_stand_above_an_agreed_configuration(attack, tmp_path, tiny_config):
    agreed = tmp_path / "agreed.yaml"
    agreed.write_text(dump(tiny_config("fedavg", "tuner=full")), encoding="utf-8")
    assert "numbers in an update" in attack(("fedavg", "tuner=full"), config=str(agreed)).reason()


RUNS = {
    "defaults": ("fedavg",),
    "fedprox": ("fedprox",),
    "fedper": ("fedper",),
    "fedrep": ("fedrep",),
    "fedmcp": ("fedmcp",),
    "fedmcp without similarity": ("fedmcp", "method.mu=0"),
    "ditto": ("ditto",),
    "apfl": ("apfl",),
    "scaffold": ("scaffold", "train.optimizer=sgd"),
    "feddpa-t": ("feddpa-t", "tuner=lora"),
    "ffa-lora": ("ffa-lora", "tuner=lora"),
    "flora": ("flora", "tuner=lora", "aggregation=flora"),
    "moon": ("moon",),
    "prompts": ("fedavg", "tuner=prompt", "tuner.tokens=4"),
    "ia3": ("fedavg", "tuner=ia3"),
    "full": ("fedavg", "tuner=full"),
    "one row a step": ("fedavg", "train.batch_size=1"),
    "large steps": ("fedavg", "train.lr=1", "train.optimizer=sgd"),
    "one step": ("fedavg", "train.steps=1"),
    "three hundred rounds": ("fedavg", "rounds=300"),
    "few bytes": ("fedavg", "uplink=topk"),
    "balanced": ("fedavg", "train.class_weights=balanced"),
}

NO_NOISE = {"fedmcp": "couples the rows", "full": "tuner", "balanced": "class_weights"}
"""Runs that noise on rows cannot cover, with words of the reason."""

SHORT = {
    "trusting": ("defaults", "fedmcp", "full", "three hundred rounds", "few bytes"),
    "private": ("defaults", "fedmcp", "scaffold", "full", "balanced", "one row a step"),
}
"""Runs of `make test` by policy; the others take the same ways."""


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        pytest.param(policy, name, marks=() if name in SHORT[policy] else pytest.mark.long)
        for policy in SHORT
        for name in RUNS
    ],
)
def test_an_ordinary_run(policy, name, attack):
    method, *words = RUNS[name]
    settings = {"policy": {"preset": policy}, "caps": False}
    noise = {} if policy == "trusting" else {"privacy__unit": "row", "privacy__epsilon": 4.0}
    if noise:
        settings["privacy"] = {"epsilon": 8.0}
    attacker = attack((method, "rounds=2", *words), changes=noise, **settings)
    reason = attacker.reason("hello")
    if noise and name in NO_NOISE:
        assert NO_NOISE[name] in reason
    else:
        assert reason == ""
        assert attacker.reason("round") == ""
