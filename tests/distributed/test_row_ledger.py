"""Noise on rows at a silo: each answer is charged once, whatever the coordinator asks for, and nothing else leaves."""

from __future__ import annotations

import json
import math
import random
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from silotune.communication.messages import UPDATE_FIELDS, unpack
from silotune.communication.privacy.noise import NoiseStream
from silotune.communication.privacy.row_accountant import Events, RenyiFilter, RowFilters, row_epsilon
from silotune.core.records import check_audit
from silotune.deploy.printing import print_audit
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.row_ledger import Charge, RowLedger
from silotune.distributed.silo.silo_config import RowBudget
from silotune.distributed.silo.store import SiloStore
from silotune.distributed.silo.worker import WorkerMetrics
from silotune.errors import InputError
from silotune.runs.model_file import require_guarantee
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


def cost(epsilon: float, events: Events) -> float:
    """The ε of a budget's first filter, which alone counts answers beyond a plan."""
    steps = RowFilters.of(epsilon, 1e-5).steps
    return steps.spent(steps.costs(events))


def share(epsilon: float, left: float, plan: RowPlan) -> float:
    """The ε of a run in a budget's second filter."""
    runs = RowFilters.of(epsilon, 1e-5).runs
    assert runs is not None
    return runs.cost(plan.events, left)


def ledger_of(folder: Path, epsilon: float) -> RowLedger:
    return SiloStore(folder, budget=RowBudget(epsilon=epsilon)).ledger


def test_reservations_and_charges(tmp_path):
    ledger = ledger_of(tmp_path, 6.0)
    assert ledger.spent("row") == 0
    plan = ledger.plan("a", "config", PLAN, reserve=True)
    assert plan == PLAN, "the budget has room for what the run asks for"
    whole = share(6.0, 6.0, PLAN)
    assert 0 < whole < cost(6.0, PLAN.events)
    assert ledger.spent("row") == pytest.approx(whole)
    for asked in ("one", "one"):  # the same draws again
        ledger.charge(charge(asked, 1))
        assert ledger.spent("row") == pytest.approx(whole)
    ledger.charge(charge("other", 1))  # another broadcast for the same round: the second round's reservation is used
    assert ledger.spent("row") == pytest.approx(whole)
    ledger.charge(charge("two", 2))  # beyond the plan, so that the first filter alone goes on
    assert ledger.spent("row") == pytest.approx(cost(6.0, ((1.5, 0.1, 30),)))
    assert len(charges(tmp_path)) == 3


def test_a_run_costs_its_whole_plan_from_its_first_answer_on(tmp_path):
    """In the second filter: the first counts what was answered, once the run's reservation is freed."""
    ledger, plan = ledger_of(tmp_path, 3.0), replace(PLAN, steps=(0, 1, 60))
    ledger.charge(charge("one", 1, plan))
    whole = share(3.0, 3.0, plan)
    assert ledger.spent("row") == pytest.approx(whole)
    ledger.close("a")  # abandoned
    answered = cost(3.0, ((1.5, 0.1, 1),))
    assert answered < whole
    assert ledger.spent("row") == pytest.approx(answered)
    costs = ledger._costs(ledger._filters("row"), "row")
    assert costs.runs == pytest.approx(whole), "a run that stops early gets nothing back here"


def test_an_answer_beyond_the_plan_leaves_the_second_filter_for_good(tmp_path):
    ledger = ledger_of(tmp_path, 1.5)
    plan = ledger.plan("a", "config", PLAN)
    assert cost(1.5, plan.events) > 1.5, "the first filter would not have allowed the run"
    ledger.charge(charge("one", 2, plan))
    ledger.charge(charge("two", 2, plan))
    with pytest.raises(InputError, match="the budget for each row is spent"):
        ledger.charge(charge("three", 2, plan))
    assert len(charges(tmp_path)) == 2


def test_a_filter_that_ended_does_not_come_back(tmp_path):
    ledger = ledger_of(tmp_path, 3.5)
    for asked in ("one", "two", "three"):
        ledger.charge(charge(asked, 2))
    assert ledger._costs(ledger._filters("row"), "row").runs == math.inf
    plan = ledger.plan("b", "config", PLAN)
    assert plan.multiplier > PLAN.multiplier
    ledger.charge(charge("four", 1, plan, run="b"))
    assert ledger._costs(ledger._filters("row"), "row").runs == math.inf
    assert cost(3.5, ((1.5, 0.1, 30), (plan.multiplier, 0.1, 20))) == pytest.approx(ledger.spent("row"))
    assert ledger.spent("row") <= 3.5


def test_the_epsilon_of_a_run_is_of_what_was_charged_where_it_asked_for_more(tmp_path):
    """`silotune release` and `silo audit` show it."""
    ledger = SiloStore(tmp_path).ledger
    ledger.charge(charge("one", 1))
    assert ledger.epsilon_of("a", 1e-5) == row_epsilon(1.5, 1e-5, 0.1, 20), "an end that depends on answers is not free"
    for asked in ("two", "three"):
        ledger.charge(charge(asked, 1))
    assert ledger.epsilon_of("a", 1e-5) == row_epsilon(1.5, 1e-5, 0.1, 30)
    assert ledger.epsilon_of("b", 1e-5) == 0


def test_later_runs_take_more_noise_until_nothing_is_left(tmp_path):
    ledger = ledger_of(tmp_path, 3.0)
    for most, allowed in ((1.05, r"a run with privacy\.more_noise=true, or one that"), (1.0, "one that")):
        few = ledger_of(tmp_path / str(most), 3.0)
        with pytest.raises(InputError, match=rf"takes [\d.]+ times the noise .*; allowed: {allowed}"):
            [few.plan(str(number), "config", PLAN, reserve=True, most=most) for number in range(3)]
    noises = [ledger.plan(str(number), "config", PLAN, reserve=True).multiplier for number in range(2)]
    with pytest.raises(InputError, match="the rest of the budget for each row is too small for 20 steps"):
        ledger.plan("last", "config", PLAN)
    assert noises[0] == PLAN.multiplier < noises[1]
    spent = ledger.spent("row")
    assert 0.9 * BUDGET.epsilon < spent <= BUDGET.epsilon
    with pytest.raises(InputError, match="the budget for each row is spent"):
        ledger.require(charge("more", 1, replace(PLAN, multiplier=noises[0]), run="another"))
    ledger.close("0")  # its operator rejects the run, which never trained
    assert ledger.spent("row") < spent
    assert ledger_of(tmp_path, 3.0).spent("row") == ledger.spent("row")


def test_another_budget_keeps_the_filters_and_what_was_spent(tmp_path):
    first = ledger_of(tmp_path, 3.0)
    first.charge(charge("one", 2))
    larger = ledger_of(tmp_path, 30.0)
    assert larger._filters("row").steps.orders == first._filters("row").steps.orders
    assert larger._filters("row").runs == first._filters("row").runs
    assert larger.spent("row") == first.spent("row") > 0
    assert not ledger_of(tmp_path, 0.1)._filters("row").allows(first._costs(first._filters("row"), "row"))
    assert RowLedger(first._records, RowBudget(epsilon=3.0, delta=1e-6))._filters("row").runs is None
    assert SiloStore(tmp_path).ledger.spent("row") is None
    assert RowLedger(SiloStore(tmp_path).records, RowBudget(unit="patient", epsilon=1.0)).spent("row") is None


def test_a_ledger_from_before_keeps_its_one_filter(tmp_path):
    old = SiloStore(tmp_path).records
    orders = RenyiFilter.of(3.0, 1e-5).orders
    with old.transaction() as connection:
        connection.execute("INSERT INTO row_orders VALUES ('row', ?)", [json.dumps(orders)])
        connection.execute("INSERT INTO row_runs VALUES ('a', 'config', 'row', 1.5, 0.1, 20, 1)")
        connection.execute("INSERT INTO row_charges VALUES ('one', 'a', 'config', 'row', 1.5, 0.1, 10, 'm')")
    old.close()
    ledger, filter = ledger_of(tmp_path, 3.0), RenyiFilter.of(3.0, 1e-5)
    assert ledger._filters("row").runs is None
    assert ledger.spent("row") == pytest.approx(filter.spent(filter.costs(PLAN.events)))
    ledger.charge(charge("two", 2))
    assert ledger._filters("row").steps == filter
    assert ledger.spent("row") == pytest.approx(filter.spent(filter.costs(PLAN.events)))


def game(folder: Path, name: int) -> None:
    """Answer as often as the ledger allows, as a silo's worker does; another one shares the folder."""
    ledger, rng, number = ledger_of(folder, 3.0), random.Random(name), 0
    with (folder / "left").open("a", buffering=1) as left:
        while True:
            number, run = number + 1, f"{rng.randrange(12):016d}"
            with suppress(InputError):
                plan = ledger.plan(run, "c", RowPlan("row", 0.02, (0, 5, 10), 1.0), reserve=rng.random() < 0.5)
                one = Charge(f"{name}-{number}", run, "c", plan, rng.choice((1, 2)), "m")
                ledger.require(one)
                with ledger._records.transaction():
                    ledger.charge(one)
                    ledger._records.append({"kind": "answer", "asked": one.question})
                print(one.question, file=left)  # it leaves after the commit


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_kills_at_any_moment_leave_no_answer_unpaid(kills, tmp_path):
    rng, ledger, fork = random.Random(kills), ledger_of(tmp_path, 3.0), get_context("fork")
    ledger.plan("0", "c", PLAN)  # the libraries are loaded, and the file is there, before the silos begin

    def begin(number):
        player = fork.Process(target=game, args=(tmp_path, number))
        player.start()
        return player

    players = [begin(0), begin(1)]
    try:
        for number in range(kills):
            time.sleep(rng.uniform(0.1, 0.5) * (1 if kills == 2 else 6))
            players[number % 2].kill()
            players[number % 2].join()
            players[number % 2] = begin(number + 2)
        ends = time.monotonic() + 30
        while not ledger._records.rows("SELECT 1 FROM row_charges") and time.monotonic() < ends:
            time.sleep(0.05)
    finally:
        for player in players:
            player.kill()
            player.join()
    filters, rows = (
        ledger._filters("row"),
        ledger._records.rows("SELECT asked, run, multiplier, steps FROM row_charges"),
    )
    left = {*(tmp_path / "left").read_text().split()}
    assert left <= {asked for asked, *_ in rows}
    assert check_audit(tmp_path)[1] == []
    used = filters.steps.spent(filters.steps.costs(tuple((noise, 0.02, steps) for _, _, noise, steps in rows)))
    runs = {run: sum(steps for _, of, _, steps in rows if of == run) for _, run, *_ in rows}
    shares = dict(ledger._records.rows("SELECT run, share FROM row_shares"))
    whole = sum(shares[run] if steps <= 10 else math.inf for run, steps in runs.items())
    assert rows
    assert min(used, whole) <= 3.0


# -- a federation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("fedmcp", "method.mu=0"), marks=pytest.mark.long),
        ("fedlora",),
        ("fedlora", "privacy.parts=all"),
    ],
)
def test_a_federation_in_which_only_noised_parts_leave(words, tiny_config, tmp_path, capsys):
    """FedLoRA has a final phase without noise, after which nothing leaves; with noise on all parts it is paid for."""
    config = tiny_config(*words, *NOISE)
    configs = local_configs(config, tmp_path / "run", **PRIVATE)
    frames = [decode(data) for _, data in coordinated(config, tmp_path / "run", configs).came]
    assert {frame.kind for frame in frames} == {"hello", "answer", "scores"}
    for frame in frames:
        assert frame.kind == "hello" or frame.fields.keys() <= {"silo", "round", "state", "metrics", "note", "scores"}
        assert not any(frame.fields.get(name) for name in ("metrics", "note", "scores"))
    summary = read_summary(tmp_path / "run")
    assert summary["rounds"] == 2
    assert summary["privacy"].items() >= {"mechanism": "dp-sgd", "unit": "row", "epsilon_total": 4.0}.items()
    assert summary["privacy"]["silos"] == dict.fromkeys(configs, 1.0)
    for name, local in configs.items():
        folder = Path(local.folder)
        assert [steps for steps, _ in charges(folder)] == ([2, 2, 2] if words[-1].endswith("all") else [2, 2]), name
        assert 0 < SiloStore(folder, budget=local.privacy).ledger.spent("row") <= 8.0
        spent = SiloStore(folder, budget=local.privacy).ledger.spent("row")
        values = {each.name: each.samples[0].value for each in WorkerMetrics(local).measures() if each.samples}
        assert values["silotune_worker_epsilon_sum"] == spent
        assert values["silotune_worker_epsilon_budget"] == 8.0
        capsys.readouterr()
        print_audit(folder, True, SiloStore(folder, budget=local.privacy).ledger)
        audit = json.loads(capsys.readouterr().out)
        assert audit["privacy"] == {"unit": "row", "spent": spent, "epsilon": 8.0, "delta": 1e-5}
        (of_run,) = (run["epsilon"] for run in audit["runs"].values() if run["rounds"])
        assert of_run == pytest.approx(4.0, rel=0.01)
        (path,) = folder.glob("*/models/*/model.json")
        model = json.loads(path.read_text())
        assert model["privacy"]["mechanism"] == "dp-sgd"
        assert (model["rows"] is None) == words[-1].endswith("all")
        require_guarantee(model, without=words == ("fedlora",))
        if words == ("fedlora",):
            with pytest.raises(InputError, match=r"without noise on rows, so that no ε.*--without-guarantee"):
                require_guarantee(model, without=False)


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
    attacker = private(share=["status"])
    for kind in ("hello", "round"):
        status = attacker.ask(kind).fields["status"]
        left = status.pop("epsilon_left")
        assert not any(status.values())
        assert (left == 8.0) == (kind == "hello"), "a greeting sets nothing aside where nobody approves"
    assert 0 < left < 8


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
    monkeypatch.setattr(NoiseStream, "whole", lambda stream, *law: torch.zeros(law[2], dtype=torch.int64))
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
    draws = RowPrivacy.digest
    monkeypatch.setattr(RowPrivacy, "digest", lambda self, silo, number, _, state: draws(self, silo, number, {}, state))
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


def test_reasons_that_do_not_follow_from_rows_reach_the_coordinator(private):
    """Whether labels are declared, a file is there, or the parts suit the backbone, is no matter of rows."""
    attacker = private()
    (task,) = Path(attacker.settings.rows).glob("task.json")
    declared = task.read_text()
    task.write_text(json.dumps({**json.loads(declared), "declared": False}))
    assert "labels were declared" in attacker.reason("hello")
    task.unlink()
    assert attacker.reason("hello") == "silo 'alpha': its rows cannot be used: a file is missing (see the worker's log)"
    task.write_text(declared.replace('"good"', '"a":'))  # what is in a file may be rows
    assert attacker.reason("hello") == "see the worker's log"
    task.write_text(declared)
    assert attacker.reason("hello") == ""


def test_reasons_that_follow_from_rows_stay(private, monkeypatch):
    attacker = private()
    monkeypatch.setattr(
        "silotune.training.client.SiloClient.rounds", lambda *_: (_ for _ in ()).throw(ValueError("row 17: secret"))
    )
    reply = attacker.ask("round")
    assert (reply.kind, reply.fields["reason"]) == ("failed", "see the worker's log")
