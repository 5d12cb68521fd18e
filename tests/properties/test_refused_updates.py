"""A malformed update is refused, named in the log, and the round goes on: the others are aggregated without it."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from silotune.core.tensors import digest, flatten
from silotune.runs.build.builder import build
from tests.support.method_cases import (
    CASES,
    KINDS,
    ONE_TASK_ROWS,
    TRAIN_ROWS,
    Wire,
    logged,
    of_kinds,
    read_message,
    tapped,
)

VICTIM = "beta"
AVERAGED = [name for name, case in CASES.items() if case.adopts_the_mean]


def repacked(message: bytes, change) -> bytes:
    """Change a message's tensors and fields by `change(tensors, fields)` and pack it again."""
    tensors, header = read_message(message)
    fields = json.loads(header["__metadata__"]["silotune"])
    change(tensors, fields)
    return save(tensors, metadata={"silotune": json.dumps(fields)})


def with_nan(tensors, fields) -> None:
    tensors[sorted(tensors)[-1]].view(-1)[-1] = math.nan


def with_wrong_shape(tensors, fields) -> None:
    name = sorted(tensors)[0]
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def of_wrong_round(tensors, fields) -> None:
    fields["round"] += 1


HARMS = {"NaN": with_nan, "shape": with_wrong_shape, "round": of_wrong_round}
ONE_HARM_EACH = [
    pytest.param(case, harm, marks=() if case in KINDS else pytest.mark.long)
    for number, case in enumerate(AVERAGED)
    for position, harm in enumerate(HARMS)
    if case == "fedmcp" or number % len(HARMS) == position
]


def arrays(message: bytes) -> dict[str, np.ndarray]:
    """Return a message's tensors."""
    return {name: tensor.numpy() for name, tensor in read_message(message)[0].items()}


def averaged(messages: dict[str, bytes], weights: dict[str, float]) -> dict[str, np.ndarray]:
    """Average messages with weights in NumPy, in float64."""
    tensors = {silo: read_message(message)[0] for silo, message in messages.items()}
    silos = list(tensors)
    return {
        name: np.average(
            [tensors[silo][name].double().numpy() for silo in silos], axis=0, weights=[weights[silo] for silo in silos]
        )
        for name in tensors[silos[0]]
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> None:
    """Assert equality to one unit in the last place: a sum of three numbers may round in another order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_max_ulp(found[name].numpy(), value.astype(np.float32), maxulp=1)


@pytest.mark.parametrize(("case", "harm"), ONE_HARM_EACH)
def test_one_refused_update(federate, reference, case, harm, tmp_path):
    run, honest = reference(case)
    if not honest.up:
        return  # the method sends nothing
    victim = sorted(run.federation.silos)[1]

    def tamper(number: int, silo: str, message: bytes) -> bytes:
        return repacked(message, HARMS[harm]) if silo == victim else message

    out = tmp_path / "run"
    with tapped(tamper) as wire:
        harmed = federate.run(case, out, "rounds=1", "aggregation=samples")
    (refusal,) = logged(out, "refused")
    assert (refusal["round"], refusal["silo"]) == (1, victim)
    assert harm in refusal["reason"]
    others = {silo: message for silo, message in wire.updates(1).items() if silo != victim}
    rows = {silo: sum(map(len, harmed.federation.silos[silo].train.values())) for silo in others}
    assert len(others) == len(harmed.federation.silos) - 1
    assert_equal(flatten(harmed.federation.coordinator.shared), arrays(wire.down[0]) | averaged(others, rows))
    (done,) = logged(out, "round")
    assert done["silos"] == sorted(others)
    # the silo whose update was refused goes on with its own private state
    trained = wire.final_results.get(victim, wire.results[1, victim]).state
    kept = harmed.federation.silos[victim].state.private
    elsewhere = harmed.federation.coordinator.shared.keys() | harmed.federation.context.fixed.keys()
    assert kept.keys() == {part for part, tensors in trained.items() if tensors} - elsewhere
    assert all(digest(kept[part]) == digest(trained[part]) for part in kept)


def test_the_next_round_begins_from_the_aggregate_of_the_others(federate, tmp_path):
    def tamper(number: int, silo: str, message: bytes) -> bytes:
        return repacked(message, with_nan) if (number, silo) == (1, VICTIM) else message

    warned: list[str] = []
    with tapped(tamper) as wire:
        run = federate.run("fedmcp", tmp_path / "run", warn=warned.append)
    assert re.fullmatch(rf"1 update was refused; the first in round 1 from {VICTIM}: .*NaN.*", warned[-1])
    silos = len(TRAIN_ROWS)
    others = {silo: message for silo, message in wire.updates(1).items() if silo != VICTIM}
    second = averaged(others, dict.fromkeys(others, 1.0))
    for broadcast in wire.down[silos:]:
        tensors, header = read_message(broadcast)
        assert json.loads(header["__metadata__"]["silotune"]) == {"round": 2}
        assert_equal(tensors, second)
    assert [event["silo"] for event in logged(run.folder, "refused")] == [VICTIM]
    everyone = wire.updates(2)  # the silo is heard again
    assert set(everyone) == set(TRAIN_ROWS)
    shared = load_file(run.folder / "checkpoints" / "shared-0002.safetensors")
    shared = {name.removeprefix("shared/"): tensor for name, tensor in shared.items()}
    assert_equal(shared, averaged(everyone, dict.fromkeys(everyone, 1.0)))


def test_all_updates_refused(federate, tmp_path):
    """The shared parts stay as they were, and the run finishes."""
    with tapped(lambda number, silo, message: message[:-1]) as wire:
        run = federate.run("fedavg", tmp_path / "run")
    silos = run.federation.silos.values()
    start = run.federation.context.initial.shared(silos)
    assert run.summary["shared_sha256"] == digest(flatten(start))
    assert len(logged(run.folder, "refused")) == len(wire.up) == 2 * len(TRAIN_ROWS)
    assert run.summary["bytes_up"] > 0


def test_an_update_above_the_bound_of_its_norm_is_refused(federate, reference, tmp_path):
    """The bound lies between the largest and the second largest norm of what an update changes."""
    _, wire = reference("fedavg")
    before = read_message(wire.down[0])[0]
    norms = {
        silo: math.sqrt(
            sum(float(((t.double() - before[name].double()) ** 2).sum()) for name, t in read_message(sent)[0].items())
        )
        for silo, sent in wire.updates(1).items()
    }
    second, largest = sorted(norms, key=norms.__getitem__)[-2:]
    bound = (norms[second] + norms[largest]) / 2
    run = federate.run("fedavg", tmp_path / "run", f"aggregation.max_norm={bound!r}", "rounds=1")
    assert [event["silo"] for event in logged(run.folder, "refused")] == [largest]


# -- weights ----------------------------------------------------------------------------------------------------------


def assert_weighted(found: dict[str, torch.Tensor], wire: Wire, case: str, by_rows: bool) -> None:
    updates, before = wire.updates(1), arrays(wire.down[0])
    rows = ONE_TASK_ROWS if CASES[case].one_task else TRAIN_ROWS
    assert len(set(rows.values())) == len(updates) == 3
    means = {True: averaged(updates, rows), False: averaged(updates, dict.fromkeys(rows, 1.0))}
    means = {key: before | mean for key, mean in means.items()}
    assert_equal(found, means[by_rows])
    with pytest.raises(AssertionError):
        assert_equal(found, means[not by_rows])


@pytest.mark.parametrize("case", of_kinds(AVERAGED, KINDS))
def test_updates_weighted_uniformly(reference, case):
    """Round 2 begins from what round 1 was aggregated to."""
    run, wire = reference(case)
    assert run.federation.config.aggregation.name == "uniform"
    if wire.up:
        assert_weighted(read_message(wire.down[-1])[0], wire, case, by_rows=False)


@pytest.mark.parametrize("case", of_kinds(AVERAGED, KINDS))
def test_updates_weighted_by_training_rows(federate, reference, case):
    """The messages of a run that weights uniformly, aggregated by rows; `test_one_refused_update` runs by rows."""
    _, wire = reference(case)
    if not wire.up:
        return  # the method sends nothing
    coordinator = build(federate.config(case, "aggregation=samples"), federate.backbone).coordinator
    coordinator.aggregate([coordinator.receive(1, silo, sent) for silo, sent in wire.updates(1).items()], 1)
    assert_weighted(flatten(coordinator.shared), wire, case, by_rows=True)
