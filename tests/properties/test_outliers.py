"""An update far outside the others' norms is held back and named; an aggregate that is not finite is never adopted."""

from __future__ import annotations

import json
import re

import pytest
import torch

from silotune.aggregation import Update, change_norm
from silotune.aggregation.outliers import OutlierFilter, check_aggregate
from silotune.core.tensors import flatten
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import Frame, decode
from silotune.errors import SilotuneError
from silotune.runs.storage.readers import read_summary
from tests.properties.test_refused_updates import averaged, repacked
from tests.support.method_cases import CASES, logged, tapped
from tests.support.session_rig import DirectLink, answering, job, local_configs

ATTACKED = [name for name, case in CASES.items() if case.adopts_the_mean]
SOME = ("fedmcp", "fedavg")


def scaled(message, factor):
    """The message with its numbers times `factor`, or less where they would be infinite in float32."""

    def change(tensors, fields):
        for name, tensor in tensors.items():
            tensors[name] = tensor * (factor / max(1.0, factor / 3e38 * float(tensor.abs().max())))

    return repacked(message, change)


@pytest.mark.parametrize("factor", [1e6, 3e38])
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in SOME else pytest.mark.long) for c in ATTACKED])
def test_a_poisoned_update_is_held_back_and_named(federate, reference, case, factor, tmp_path):
    run, honest = reference(case)
    if not honest.up:
        return  # the method sends nothing
    victim = sorted(run.federation.silos)[1]

    def tamper(number, silo, message):
        return scaled(message, factor) if silo == victim else message

    with tapped(tamper) as wire:
        harmed = federate.run(case, tmp_path / "run", "rounds=1")
    (refusal,) = logged(tmp_path / "run", "refused")
    assert (refusal["round"], refusal["silo"]) == (1, victim)
    assert "norm of the update" in refusal["reason"]
    others = {silo: message for silo, message in wire.updates(1).items() if silo != victim}
    found = flatten(harmed.federation.coordinator.shared)
    for name, expected in averaged(others, dict.fromkeys(others, 1.0)).items():
        assert found[name].numpy() == pytest.approx(expected, abs=1e-6)


def test_without_the_key_the_update_is_taken(federate, tmp_path):
    with tapped(lambda number, silo, message: scaled(message, 1e6) if silo == "beta" else message):
        federate.run("fedavg", tmp_path / "run", "rounds=1", "aggregation.outlier=null")
    assert not logged(tmp_path / "run", "refused")


def test_an_aggregate_that_is_not_finite_names_who_did_it_and_is_not_adopted(federate, tmp_path):
    words = ("rounds=1", "aggregation.outlier=null", "server.optimizer=avgm", "server.lr=1e30")
    with pytest.raises(SilotuneError, match=r"round 1: the aggregate cannot be used .* silo '\w+' sent"):
        federate.run("fedavg", tmp_path / "run", *words)
    assert not list((tmp_path / "run" / "checkpoints").glob("round-*.json"))


def test_over_flower_the_same_update_is_held_back(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=2", "train.steps=1")
    configs = local_configs(config, tmp_path / "run")
    answers = answering(configs)

    def poisoned(data):
        frame = decode(answers[1](data))
        if frame.kind != "answer":
            return frame.encode()
        return Frame(frame.kind, frame.fields, {"message": scaled(frame.blobs["message"], 1e6)}).encode()

    coordinate(job(config, tmp_path / "run", configs), DirectLink({**answers, 1: poisoned}))
    assert [event["silo"] for event in logged(tmp_path / "run", "refused")] == ["beta", "beta"]
    assert [event["silos"] for event in logged(tmp_path / "run", "round")] == [["alpha", "gamma"]] * 2
    assert read_summary(tmp_path / "run")["rounds"] == 2


def updates_of(norms):
    for number, norm in enumerate(norms):
        yield Update(f"silo-{number}", {"part/x": torch.tensor([float(norm)])}, 1)


@pytest.mark.parametrize(
    ("norms", "held"),
    [
        ([1, 1, 101], [2]),
        ([1, 1, 100], []),
        ([1, 1e9], []),  # of two, nobody knows which one is wrong
        ([1e-3, 1e-3, 1], [2]),  # the unit of norms does not matter
        ([0, 0, 5], []),  # silos that learned nothing are no measure
        ([1e9, 1e9, 1, 1, 1], [0, 1]),
        ([1, float("inf")], [1]),
    ],
)
def test_who_is_held_back(norms, held):
    refused = []
    judge = OutlierFilter({"part/x": torch.zeros(1)}, 100.0, lambda silo, _: refused.append(silo))
    taken = [update.silo for update in judge(updates_of(norms))]
    assert sorted(refused) == [f"silo-{number}" for number in held]
    assert taken == [f"silo-{number}" for number in range(len(norms)) if number not in held]


@pytest.mark.parametrize("bounds", [{"window": 16}, {"most": 4}])
def test_of_a_large_round_few_updates_wait(bounds):
    alive = []
    judge = OutlierFilter({"part/x": torch.zeros(1)}, 100.0, lambda *_: None, **bounds)
    updates = updates_of([1.0] * 50)
    for place, _ in enumerate(judge((alive.append(1) or update) for update in updates)):
        assert len(alive) - place <= 6


def test_updates_wait_until_there_are_enough_to_judge_them():
    refused = []
    judge = OutlierFilter({"part/x": torch.zeros(1)}, 100.0, lambda silo, _: refused.append(silo), window=0)
    assert [update.silo for update in judge(updates_of([1e9, 1, 1, 1]))] == ["silo-1", "silo-2", "silo-3"]
    assert refused == ["silo-0"]


@pytest.mark.parametrize(
    ("size", "norms", "blamed"),
    [
        (1e19, {"a": 1e20, "b": 1.0, "c": 2.0}, "silo 'a' sent the largest change (norm 1e+20, others up to 2)"),
        (1e19, {"a": 3.0, "b": 1e21, "c": 2e18}, "silo 'b' sent the largest change (norm 1e+21, others up to 2e+18)"),
        (1e19, {"a": 1e20, "b": 1.0}, "silo 'a'"),
        (float("inf"), {"a": 1e20, "b": 1e20}, ""),
        (1e19, {"a": 1e19, "b": 1e20, "c": 1.0}, None),  # more than one is too large: all diverge
        (1e17, {"a": 1e20, "b": 1.0}, None),  # it can be used
    ],
)
def test_who_is_to_blame_for_a_sum_that_cannot_be_used(size, norms, blamed):
    aggregate = {"part/x": torch.tensor([size])}
    if blamed is None:
        check_aggregate(aggregate, norms, 3)
        return
    with pytest.raises(SilotuneError, match=re.escape(blamed)) as caught:
        check_aggregate(aggregate, norms, 3)
    assert str(caught.value).startswith(f"round 3: the aggregate cannot be used (norm {size:.3g})")


def test_without_a_factor_no_update_waits():
    judge = OutlierFilter({"part/x": torch.zeros(1)}, None, lambda *_: None)
    updates = updates_of([1.0] * 5)
    assert next(judge(updates)).silo == "silo-0"
    assert next(updates).silo == "silo-1"


def test_updates_pass_as_they_came():
    shapes = {"part/b": (3, 2), "part/a": (300, 300), "part/c": (), "part/d": (0, 4), "part/e": (5,)}
    dtypes = dict.fromkeys(shapes, torch.float32) | {"part/e": torch.float16}
    before = {name: torch.ones(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    sent = {
        name: torch.full(shape, 1.0 + number, dtype=dtypes[name]) for number, (name, shape) in enumerate(shapes.items())
    }
    judge = OutlierFilter(before, 100.0, lambda *_: None)
    (update,) = judge([Update("one", dict(reversed(sent.items())), 3)])
    assert (update.silo, update.rows, list(update.tensors)) == ("one", 3, list(reversed(shapes)))
    for name, tensor in sent.items():
        assert update.tensors[name].dtype is tensor.dtype
        assert torch.equal(update.tensors[name], tensor)
    assert judge.norms["one"] == pytest.approx(change_norm(sent, before), rel=1e-12)


def test_events_have_the_time_in_utc(federate, tmp_path):
    federate.run("fedavg", tmp_path / "run", "rounds=1")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert all(json.loads(line)["time"].endswith("+00:00") for line in lines)
