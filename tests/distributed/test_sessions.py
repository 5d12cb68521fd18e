"""The Flower engine over silos' sessions, without Flower: the bits of one process, and faults at chosen moments."""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.run_status import RunFollower
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.session import Session
from silotune.errors import SilotuneError
from silotune.methods import METHODS
from silotune.runs.run_result import load_run
from silotune.runs.storage.readers import read_summary
from tests.support.method_cases import logged, timeless
from tests.support.processes import SAME
from tests.support.session_rig import DirectLink, LostError, answering, coordinated, federate, job, local_configs

ALL_METHODS = {name: () for name, kind in METHODS.items() if not kind.centralized}
RANKS = ("tuner.r=5", "tuner.ranks.beta=2")
ALL_METHODS |= {f"{name}, ranks": RANKS for name in ("flexlora", "hetlora", "flora")}
ALL_METHODS["apfl, ranks"] = ("tuner=lora", "aggregation=hetlora", *RANKS)
ALL_METHODS["fedavg, afl"] = ("aggregation=afl",)
ALL_METHODS["rolora, ranks"] = ("aggregation=flexlora", *RANKS)
UPLINKS = [(), ("sampling.count=2",), ("uplink=clip,laplace,int8",), ("uplink=topk", "uplink.fraction=0.3")]
SHORT = ("rounds=3", "train.steps=2")
NO_FEEDBACK = ("flexlora", "fedsvd", "fedalt", "fedmomentum", "flexlora, ranks", "rolora, ranks")


def same(summary):
    """What ends with the same bits; the majority in `global` is of rows that no coordinator has."""
    return {key: summary[key] for key in SAME if key != "global"}


@pytest.fixture(scope="module")
def federated(tiny_config, tmp_path_factory):
    """`federated(method)` → run folder, summary and link of a federation. Each is made once."""

    @cache
    def finished(method):
        out = tmp_path_factory.mktemp("federated") / "run"
        summary, link = federate(tiny_config(method, *SHORT), out, order=(2, 0, 1))
        return out, summary, link

    return finished


@pytest.mark.parametrize(
    "method", ["fedmcp", "fedfame", "fedlora", "ifca", pytest.param("fedalt", marks=pytest.mark.long)]
)
def test_same_bits_as_in_one_process(whole, federated, method):
    _, expected = whole(method)
    _, summary, _ = federated(method)
    assert same(summary) == same(expected)
    assert summary["engine"] == "flower-local"
    assert summary.keys() == expected.keys() - {"baselines", "intervals"}  # the coordinator has no rows to make them of


@pytest.mark.long
@pytest.mark.parametrize("case", ALL_METHODS)
@pytest.mark.parametrize("words", UPLINKS, ids=" ".join)
def test_same_bits_for_every_method(whole, case, words, tmp_path):
    method = case.split(",")[0]
    if method == "local" and words[:1] == ("uplink=clip,laplace,int8",):
        pytest.skip("nothing is sent")
    if words[:1] == ("uplink=clip,laplace,int8",) and case in ("ifca", "fedavg, afl"):
        pytest.skip("their aggregations read a number without noise")
    feedback = ("uplink.feedback=false",) if words[:1] and "uplink" in words[0] and case in NO_FEEDBACK else ()
    config, expected = whole(method, *ALL_METHODS[case], *words, *feedback)
    summary, _ = federate(config, tmp_path / "run", order=(1, 2, 0))
    assert same(summary) == same(expected)


def test_every_round_is_judged_once_and_logged_with_the_same_scores(whole, in_one_process, tmp_path):
    config, _ = whole("fedmcp", "sampling.count=2")
    reference = in_one_process("fedmcp", *SHORT, "sampling.count=2").folder
    federate(config, tmp_path / "run")
    without_times = [[timeless(event) for event in logged(folder, "round")] for folder in (reference, tmp_path / "run")]
    assert without_times[0] == without_times[1]
    assert [event["round"] for event in without_times[1]] == [1, 2, 3]


def test_a_finished_run_opens_as_any_other(in_one_process, federated):
    texts = ["the garden was bright", "the soup became awful at last"]
    reference = in_one_process("fedmcp", *SHORT).model("alpha").predict(texts)
    assert load_run(federated("fedmcp")[0]).model("alpha").predict(texts) == reference


# -- faults ------------------------------------------------------------------------------------------------------------


class Faulty:
    """A silo that does something else at its n-th round request."""

    def __init__(self, session, at, fault):
        self.session, self.at, self.fault, self.seen = session, at, fault, 0

    def answer(self, data):
        if decode(data).kind == "round":
            self.seen += 1
            if self.seen == self.at:
                return self.fault(self, data)
        return self.session.answer(data)


def with_fault(config, out, fault, at=2):
    configs = local_configs(config, out)
    faulty = Faulty(Session(configs["beta"]), at, fault)
    return configs, DirectLink(answering(configs) | {1: faulty.answer}), faulty


def lost(_faulty, _data):
    raise LostError


def answered_and_lost(faulty, data):
    faulty.session.answer(data)
    raise LostError


def unavailable(_faulty, _data):
    return Frame("unavailable", {"silo": "", "reason": "no worker"}).encode()


@pytest.mark.parametrize("fault", [lost, answered_and_lost, unavailable], ids=lambda fault: fault.__name__)
def test_a_request_that_went_under_is_asked_again_and_answered_once(whole, trained, fault, tmp_path):
    config, expected = whole("fedmcp", "federation.patience=0.05")
    trained.clear()
    configs, link, faulty = with_fault(config, tmp_path / "run", fault)
    coordinate(job(config, tmp_path / "run", configs), link)
    assert same(read_summary(tmp_path / "run")) == same(expected)
    assert faulty.seen == 4
    assert sorted(trained) == sorted([*configs] * 3)


def test_a_restarted_worker_goes_on_from_its_folder(whole, tmp_path):
    config, expected = whole("fedmcp", "federation.patience=0.05")

    def restarted(faulty, data):
        faulty.session = Session(faulty.session.settings)
        raise LostError

    configs, link, _ = with_fault(config, tmp_path / "run", restarted, at=3)
    coordinate(job(config, tmp_path / "run", configs), link)
    assert same(read_summary(tmp_path / "run")) == same(expected)


@pytest.mark.parametrize("when", ["before the first answer", "after one answer", "after all answers"])
def test_a_coordinator_that_died_goes_on_at_the_last_finished_round(whole, when, tmp_path):
    """It dies in round 2; silos that had answered by then do not train again."""
    config, expected = whole("fedmcp")
    out = tmp_path / "run"
    configs = local_configs(config, out)
    answers = answering(configs)
    calls = {"round": 0}
    stop_at = {"before the first answer": 4, "after one answer": 5, "after all answers": 7}[when]

    class Died(BaseException):
        pass

    def dying(node):
        def answer(data):
            if decode(data).kind == "round":
                calls["round"] += 1
                if calls["round"] == stop_at:
                    raise Died
            return answers[node](data)

        return answer

    with pytest.raises(Died):
        coordinate(job(config, out, configs), DirectLink({node: dying(node) for node in answers}))
    assert RunFollower(out / "federation").poll().state == "lost"  # it did not come to say how the run ended
    coordinate(job(config, out, configs), DirectLink({node: answers[node] for node in (1, 0, 2)}))
    assert same(read_summary(out)) == same(expected)
    assert [event["round"] for event in logged(out, "round")] == [1, 2, 3]


def without_beta_in_round_2(config, out):
    """Silos' configurations, a link on which what beta is asked in round 2 goes under, and what it was asked: round
    and state."""
    configs = local_configs(config, out)
    answers, requested = answering(configs), []

    def silent(data):
        frame = decode(data)
        if frame.kind == "round":
            requested.append((frame.fields["round"], frame.fields["base"]))
            if frame.fields["round"] == 2:
                raise LostError
        return answers[1](data)

    return configs, DirectLink(answers | {1: silent}), requested


def test_below_its_quorum_a_round_is_asked_again_then_the_run_stops_with_its_state_kept(whole, tmp_path):
    config, expected = whole(
        "fedmcp", "federation.patience=0.05", "federation.deadline=0.2", "federation.retries=1", "federation.quorum=1"
    )
    out = tmp_path / "run"
    configs, link, _ = without_beta_in_round_2(config, out)
    with pytest.raises(
        SilotuneError, match=r"round 2: 2 of 3 silos .*quorum=1 asks for 3; missing: beta \(no answer\);"
    ):
        coordinate(job(config, out, configs), link)
    assert [event["arrived"] for event in logged(out, "quorum")] == [2, 2]
    assert not (out / "summary.json").exists()
    coordinated(config, out, configs)
    assert same(read_summary(out)) == same(expected)


def test_with_a_quorum_the_round_goes_on_without_an_absent_silo_which_returns(whole, tmp_path):
    config, _ = whole(
        "fedmcp", "federation.patience=0.05", "federation.deadline=0.2", "federation.quorum=0.6", "federation.retries=0"
    )
    out = tmp_path / "run"
    configs, link, requested = without_beta_in_round_2(config, out)
    coordinate(job(config, out, configs), link)
    updates = {(event["round"], event["silo"]) for event in logged(out, "silo")}
    assert (2, "beta") not in updates
    assert {(1, "beta"), (3, "beta"), (2, "alpha"), (2, "gamma")} <= updates
    assert (3, "0001") in requested  # what it has of round 2, if anything, is not built upon
    (first, _, _) = logged(out, "round")
    assert "beta" not in first["validation"]  # round 1 is judged with round 2's answers
    summary = read_summary(out)
    assert summary["best_round"] != 1 or summary["silos"]["beta"]["test"] is not None


def test_a_silo_that_lost_its_folder_is_named(whole, tmp_path):
    config, _ = whole("fedmcp", "federation.retries=0")
    out = tmp_path / "run"

    def wiped(faulty, data):
        shutil.rmtree(faulty.session.settings.folder)
        return faulty.session.answer(data)

    configs, link, _ = with_fault(config, out, wiped)
    with pytest.raises(SilotuneError, match="missing: beta"):
        coordinate(job(config, out, configs), link)
    assert "state '0001'" in logged(out, "silo-failed")[0]["reason"]
