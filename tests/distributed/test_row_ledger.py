"""Noise on rows at a silo: each answer is charged once, whatever the coordinator asks for, and nothing else leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from silotune.communication.messages import UPDATE_FIELDS, unpack
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.row_ledger import Charge, RowLedger
from silotune.distributed.silo.silo_config import RowBudget
from silotune.distributed.silo.store import SiloStore
from silotune.errors import InputError
from silotune.runs.storage.readers import read_summary
from silotune.training.row_privacy import RowPlan, RowPrivacy
from tests.support.session_rig import coordinated, local_configs

NOISE = ("privacy.unit=row", "privacy.epsilon=4", "rounds=2", "train.steps=2", "train.batch_size=8")
PRIVATE = {"policy": {"preset": "private"}, "privacy": {"epsilon": 8.0}, "seeded_noise": False}
PLAN = RowPlan("row", 0.1, (0, 10, 20), 1.5)
BUDGET = RowBudget(epsilon=3.0)


@pytest.fixture
def private(attack):
    """A silo that answers with noise on rows alone, and its coordinator."""

    def begin(method="fedavg", **settings):
        fields = {"policy": {"preset": "private"}, "privacy": {"epsilon": 8.0}}
        return attack((method, "tuner.r=1", *NOISE), caps=False, **fields | settings)

    return begin


def charges(folder: Path) -> list[tuple[int, float]]:
    return SiloStore(folder).records.rows("SELECT steps, multiplier FROM row_charges ORDER BY rowid")


# -- the ledger --------------------------------------------------------------------------------------------------------


def charge(asked: str, number: int, plan: RowPlan = PLAN, run: str = "a") -> Charge:
    return Charge(asked, run, "config", plan, number)


def test_reservations_and_charges(tmp_path):
    store = SiloStore(tmp_path, budget=RowBudget(epsilon=6.0))
    ledger, filter = store.ledger, store.ledger._filter("row")
    assert ledger.spent("row") == 0
    plan = ledger.plan("a", "config", PLAN, reserve=True)
    assert plan == PLAN, "the budget has room for what the run asks for"
    whole = filter.spent(filter.costs(1.5, 0.1, 20))
    assert ledger.spent("row") == pytest.approx(whole)
    for asked in ("one", "one"):  # the same draws again
        ledger.charge(charge(asked, 1))
        assert ledger.spent("row") == pytest.approx(whole)
    ledger.charge(charge("other", 1))  # another broadcast for the same round: the second round's reservation is used
    assert ledger.spent("row") == pytest.approx(whole)
    ledger.charge(charge("two", 2))
    assert ledger.spent("row") == pytest.approx(filter.spent(filter.costs(1.5, 0.1, 30)))
    assert len(charges(tmp_path)) == 3


def test_later_runs_take_more_noise_until_nothing_is_left(tmp_path):
    ledger = SiloStore(tmp_path, budget=BUDGET).ledger
    noises = [ledger.plan(str(number), "config", PLAN, reserve=True).multiplier for number in range(3)]
    with pytest.raises(InputError, match="the rest of the budget for each row is too small for 2000000 steps"):
        ledger.plan("last", "config", replace(PLAN, steps=(0, 2_000_000)))
    assert noises == sorted(noises)
    spent = ledger.spent("row")
    assert 0.9 * BUDGET.epsilon < spent <= BUDGET.epsilon * (1 + 1e-9)
    with pytest.raises(InputError, match="the budget for each row is spent"):
        ledger.require(charge("more", 1, replace(PLAN, multiplier=noises[0]), run="another"))
    ledger.close("0")  # its operator rejects the run, which never trained
    assert ledger.spent("row") < spent
    again = SiloStore(tmp_path, budget=BUDGET).ledger
    assert again.spent("row") == ledger.spent("row")


def test_another_budget_keeps_the_orders_and_what_was_spent(tmp_path):
    first = SiloStore(tmp_path, budget=BUDGET).ledger
    first.charge(charge("one", 2))
    larger = SiloStore(tmp_path, budget=RowBudget(epsilon=30.0)).ledger
    assert larger._filter("row").orders == first._filter("row").orders
    assert larger.spent("row") == first.spent("row") > 0
    assert SiloStore(tmp_path).ledger.spent("row") is None
    assert RowLedger(SiloStore(tmp_path).records, RowBudget(unit="patient", epsilon=1.0)).spent("row") is None


# -- a federation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("fedmcp", "method.mu=0"), ("fedlora",)])
def test_a_federation_in_which_only_noised_parts_leave(words, tiny_config, tmp_path):
    """FedLoRA has a final phase without noise, after which nothing leaves."""
    config = tiny_config(*words, *NOISE)
    configs = local_configs(config, tmp_path / "run", **PRIVATE)
    frames = [decode(data) for _, data in coordinated(config, tmp_path / "run", configs).came]
    assert {frame.kind for frame in frames} == {"hello", "answer", "scores"}
    for frame in frames:
        assert frame.kind == "hello" or frame.fields.keys() <= {"silo", "round", "state", "metrics", "note", "scores"}
        assert not any(frame.fields.get(name) for name in ("metrics", "note", "scores"))
    assert read_summary(tmp_path / "run")["rounds"] == 2
    for name, local in configs.items():
        folder = Path(local.folder)
        assert [steps for steps, _ in charges(folder)] == [2, 2], name
        assert 0 < SiloStore(folder, budget=local.privacy).ledger.spent("row") <= 8.0
        (model,) = folder.glob("*/models/*/model.json")
        assert json.loads(model.read_text())["privacy"]["mechanism"] == "dp-sgd"


def test_a_silo_measures_its_model_where_it_let_canaries_in(tiny_config, attack, tmp_path, silotune):
    config = tiny_config("fedavg", *NOISE, "audit.canaries=30")
    configs = local_configs(config, tmp_path / "run", **PRIVATE, canaries=30)
    coordinated(config, tmp_path / "run", configs)
    for name, local in configs.items():
        (release,) = Path(local.folder).glob("*/release.json")
        shown = silotune("release", release.parent, "--silo", name).out
        assert "of 30 coins guessed" in shown
        assert "ε by the account of its noise: 4" in shown.replace("3.99", "4").replace("3.98", "4")
    few = attack(("fedavg", *NOISE, "audit.canaries=30"), caps=False, canaries=29, **PRIVATE)
    assert "adds at most 29 canaries" in few.reason("hello")


def test_the_same_request_has_the_same_bytes_and_another_broadcast_other_noise(private):
    attacker = private()
    folder = attacker.session.store.folder
    first = attacker.ask("round")
    assert first.kind == "answer"
    assert attacker.ask("round") == first
    assert len(charges(folder)) == 1
    other = attacker.ask("round", broadcast=attacker.broadcast(add=1e-6))
    assert len(charges(folder)) == 2
    expected = attacker.federation.coordinator.expected
    one, two = (unpack(frame.blobs["message"], expected, UPDATE_FIELDS)[0] for frame in (first, other))
    moved = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert moved > 1e-3, "the noise of two broadcasts cancels"


def test_a_status_tells_of_the_budget_alone(private):
    status = private(share=["status"]).ask("hello").fields["status"]
    assert 0 < status.pop("epsilon_left") < 8
    assert not any(status.values())


def test_another_run_over_the_same_tensors_pays_again(private):
    """Its draws are others, so the mean of many such answers would lose its noise."""
    attacker = private()
    store = attacker.session.store
    first = attacker.ask("round")
    spent = store.ledger.spent("row")
    attacker.run = "1" * 16
    second = attacker.ask("round")
    assert (first.kind, second.kind) == ("answer", "answer")
    assert first.blobs["message"] != second.blobs["message"]
    assert len(charges(store.folder)) == 2
    assert store.ledger.spent("row") > spent


def test_a_run_that_goes_on_with_fewer_silos_reserves_nothing_more(private):
    attacker = private()
    ledger = attacker.session.store.ledger
    assert attacker.ask("round").kind == "answer"
    spent = ledger.spent("row")
    attacker.configure(federation__silos=["alpha", "beta"])
    assert attacker.ask("round", 2, base="0001").kind == "answer"
    assert ledger.spent("row") == pytest.approx(spent)


def test_a_state_of_another_configuration_is_no_base(private):
    """It may have been trained without noise, and what reads it would carry that out."""
    attacker = private()
    attacker.configure(train__lr=0.5)
    assert attacker.ask("round").kind == "answer"
    attacker.configure()
    assert attacker.ask("round", 2, base="0001").kind == "failed"
    assert len(charges(attacker.session.store.folder)) == 1


def test_the_same_draws_with_another_update_do_not_leave(private, monkeypatch):
    attacker = private()
    assert attacker.ask("round").kind == "answer"
    attacker.session.store.records.rows("DELETE FROM answers")
    monkeypatch.setattr("silotune.training.private_steps.gaussian", lambda uniform, _: 0 * uniform)
    assert attacker.ask("round").kind == "failed"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("train__tokens_at_once", 9, "see the worker's log"),
        ("privacy__clip", 1e-30, "privacy.clip"),
        ("backbone", {"name": "bert", "quantization": "int8"}, "int8 rounds rows together"),
    ],
)
def test_settings_that_would_tell_of_rows(key, value, reason, private):
    attacker = private()
    attacker.configure(**{key: value})
    assert reason in attacker.reason("hello")


def test_a_second_broadcast_with_the_noise_of_the_first_is_found(private, monkeypatch):
    """Planted: draws that do not depend on the broadcast."""
    draws = RowPrivacy.draws
    monkeypatch.setattr(RowPrivacy, "draws", lambda self, silo, number, _, state: draws(self, silo, number, {}, state))
    attacker = private()
    assert attacker.ask("round").kind == "answer"
    assert attacker.ask("round", broadcast=attacker.broadcast(add=1e-3)).kind == "failed"


@pytest.mark.parametrize(("method", "kind"), [("ditto", "round"), ("fedlora", "final"), ("fedlora", "score")])
def test_no_loss_decides_whether_an_answer_comes(method, kind, private, monkeypatch):
    """Phases without noise may diverge on what a coordinator sends: by which rows do, it would learn of them."""
    attacker = private(method)
    measured: list[int] = []
    monkeypatch.setattr("silotune.distributed.silo.local_work.summary_entries", lambda *_: measured[0])
    reply = attacker.ask(kind, broadcast=attacker.broadcast(add=1e30), splits=["validation", "test"])
    assert reply.kind in ("answer", "scores")
    assert not any(reply.fields.get(name) for name in ("metrics", "note", "scores"))
    if kind == "final":
        assert attacker.ask("round", 2, base="0001-final").kind == "failed", "it has no noise"


def test_a_crash_before_an_answer_leaves_draws_again_the_same(private, monkeypatch):
    attacker = private()
    store, commit = attacker.session.store, SiloStore.commit
    lost = []

    def killed(self, run, answer, line):
        lost.append(answer.frame)
        raise KeyboardInterrupt

    monkeypatch.setattr(SiloStore, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        attacker.ask("round")
    monkeypatch.setattr(SiloStore, "commit", commit)
    assert charges(store.folder) == []
    attacker.restart()
    assert attacker.ask("round").blobs == lost[0].blobs
    assert len(charges(store.folder)) == 1


def test_a_coordinator_that_asks_again_and_again(private):
    """Each broadcast costs, until the budget is spent; the reason stays at the silo."""
    attacker = private(privacy={"epsilon": 4.5}, policy={"preset": "private", "requests_per_round": None})
    replies = [attacker.ask("round", broadcast=attacker.broadcast(add=step * 1e-3)) for step in range(8)]
    kinds = [reply.kind for reply in replies]
    assert "answer" in kinds
    assert kinds == sorted(kinds), "after the budget is spent nothing is answered"
    assert kinds[-1] == "failed"
    assert replies[-1].fields == {"silo": "alpha", "reason": "see the worker's log"}
    assert attacker.session.store.ledger.spent("row") <= 4.5


@pytest.mark.parametrize(
    ("unit", "budget", "refused"),
    [
        (None, {}, "its policy is private; allowed: runs with privacy.unit=row"),
        ("patient", {}, "its budget is of each row; allowed: privacy.unit=row"),
        ("row", {"unit": "patient"}, "its budget is of each patient"),
    ],
)
def test_runs_of_another_unit(unit, budget, refused, attack):
    attacker = attack(("fedavg", "rounds=1"), policy={"preset": "private"}, privacy={"epsilon": 8.0} | budget)
    attacker.configure(privacy__unit=unit, privacy__epsilon=None if unit is None else 4.0)
    assert refused in attacker.reason("hello")


def test_reasons_that_follow_from_rows_stay(private, monkeypatch):
    attacker = private()
    monkeypatch.setattr(
        "silotune.training.client.SiloClient.rounds", lambda *_: (_ for _ in ()).throw(ValueError("row 17: secret"))
    )
    reply = attacker.ask("round")
    assert (reply.kind, reply.fields["reason"]) == ("failed", "see the worker's log")
