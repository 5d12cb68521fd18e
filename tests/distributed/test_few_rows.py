"""Updates that few rows are behind are withheld: of broadcasts that are sure of one label; how often a silo does so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from silotune.communication.messages import broadcast_message
from silotune.data.batching import evaluation_batches
from silotune.distributed.silo.request_ledger import WITHHELD_FILE
from silotune.errors import Diverged
from silotune.methods.moon import MOON
from silotune.training import client
from silotune.training.local_trainer import LocalTrainer
from silotune.training.row_influence import RowInfluence
from tests.support.malicious import ALLOWED

SURE = (
    *("fedavg", "method.adapters=1", "head=linear", "head.scope=shared", "tuner.r=1", "rounds=6", "data.tasks=[alpha]"),
    *("train.batch_size=8", "train.batches=even", "train.optimizer=sgd", "train.lr=0.01", "train.epochs=1"),
)


def rare(attacker, folder, count):
    """Copy a silo's rows, all but `count` of the training rows with the first label."""
    shutil.copytree(attacker.settings.rows, folder)
    path, left = folder / "train.jsonl", count
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row[1], left = (1, left - 1) if row[1] == 1 and left else (0, left)
    assert not left
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


def sure(attacker, number, add=0.0):
    """A broadcast whose head is sure of the first label, within `policy.drift` of the start."""
    shared = {part: {key: tensor.clone() for key, tensor in tensors.items()} for part, tensors in
              attacker.federation.coordinator.shared.items()}  # fmt: skip
    (silo,) = attacker.federation.silos.values()
    (evaluation,) = silo.evaluations.values()
    context = attacker.federation.context
    state = shared | context.state_of(silo).private
    (head,) = (part for part, tensors in shared.items() if any(key.endswith("out.bias") for key in tensors))
    batch = next(evaluation_batches(evaluation.test, attacker.federation.backbone.pad_id))
    weight, bias = (next(key for key in shared[head] if key.endswith(f"out.{name}")) for name in ("weight", "bias"))
    directions = []
    for column in range(shared[head][weight].shape[1]):  # the mean state of made-up texts, by the public backbone
        probe = {key: torch.zeros_like(tensor) for key, tensor in shared[head].items()}
        probe[weight][0, column] = 1
        directions.append(float(context.logits(context.place(state | {head: probe}), batch)[:, 0].mean()))
    along = 0.8 * torch.sign(torch.tensor(directions))
    shared[head][weight] = shared[head][weight] * 0 + torch.stack([along, -along])
    shared[head][bias] = shared[head][bias] + torch.tensor([0.9, -0.9]) + add
    return broadcast_message(shared, number)


@pytest.fixture
def silo(attack, tmp_path):
    """`silo(count, …)` → an attacker, and a silo of which so many training rows have the second label."""

    def make(count, words=SURE, **settings):
        folder = tmp_path / f"rows-{count}"
        rows = str(folder) if folder.exists() else rare(attack(words), folder, count)
        return attack(words, rows=rows, folder=str(tmp_path / f"state-{count}"), **settings)

    return make


def test_an_update_of_one_row_is_withheld(silo):
    attacker = silo(1)
    reason = attacker.reason(broadcast=sure(attacker, 1))
    assert reason == "silo 'alpha': its policy refuses this update; too few rows are behind it (policy.effective_rows)"
    assert silo(1, policy={"effective_rows": 0}, run="b" * 16).reason(broadcast=sure(attacker, 1)) == ""
    assert silo(20).reason(broadcast=sure(attacker, 1)) == ""
    assert attacker.reason() == ""  # an honest broadcast


def test_a_silo_leaves_a_run_that_asks_too_often(silo):
    """Each refusal tells something; a repeated one does not count."""
    attacker, few = silo(1), "too few rows are behind it"
    for add in (0, 0.01, 0.01, 0.02):
        assert few in attacker.reason(broadcast=sure(attacker, 1, add))
        attacker.restart()
    left = "refuses more requests; too few rows were behind updates, or requests failed (policy.withheld)"
    assert left in attacker.reason("round", 2)
    assert left in attacker.reason("score", 2)
    record = (Path(attacker.settings.folder) / WITHHELD_FILE).read_text(encoding="utf-8").splitlines()
    assert len(record) == 3
    other = silo(1, run="b" * 16, policy={"withheld_in_all": 4})
    assert few in other.reason(broadcast=sure(other, 1, 0.03))
    assert "(policy.withheld_in_all)" in other.reason("round", 2)


def test_noise_hides_single_rows_already(silo):
    words = (*SURE, "uplink=clip,laplace", "uplink.epsilon=8")
    attacker = silo(1, words, seeded_noise=True)
    assert attacker.reason(broadcast=sure(attacker, 1)) == ""


def test_the_watch_changes_no_bit(tiny_federation):
    results = []
    for influence in (None, RowInfluence(["global"])):
        federation = tiny_federation("fedmcp")
        federation.context.influence = influence
        (result,) = federation.trainer.rounds([federation.silos["alpha"]], federation.coordinator.shared, 1)
        results.append(result.state["global"])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_effective_rows():
    influence = RowInfluence(["global"])
    assert influence.effective_rows() is None
    influence._pulls["train", "full", "head", "a"] = torch.zeros(5)
    assert influence.effective_rows() is None  # nothing pulls, nothing is told
    influence._pulls["train", "full", "head", "b"] = torch.tensor([1.0, 1, 1, 1, 0])
    assert influence.effective_rows() == pytest.approx(4)
    influence._pulls["train", "full", "head", "c"] = torch.tensor([1.0, 0, 0, 1e-9, 0])
    assert influence.effective_rows() == pytest.approx(1)


def test_rows_count_by_how_far_their_steps_move_a_tensor():
    """Of three steps of two rows the second alone moves `b`, and one of its rows alone pulls."""
    influence = RowInfluence(["global"])
    influence._pulls["train", "full", "head", "a"] = torch.tensor([1.0, 1, 4, 0, 1, 1]).double()
    pieces = [([0, 1], [1.0, 1.0]), ([2, 3], [4.0, 0.0]), ([4, 5], [1.0, 1.0])]
    influence._shares["train", "full", "head", "a"] = {
        step: [(torch.tensor(rows), torch.tensor(pulls).double())] for step, (rows, pulls) in enumerate(pieces)
    }
    influence._rows_of["train"] = [2, 2, 2]
    influence._moves["train"] = [[1.0], [1.0], [1.0]]
    assert influence.effective_rows() == pytest.approx(64 / 20)
    assert influence.rows_of_steps() == pytest.approx(6)
    influence._moves["train"] = [[1.0, 0.0], [1.0, 0.1], [1.0, 0.0]]
    assert influence.effective_rows() == pytest.approx(1)
    assert influence.rows_of_steps() == pytest.approx(2)
    influence._moves["train"] = [[1.0, 0.0], [1.0, 1e-9], [1.0, 0.0]]  # rounding
    assert influence.effective_rows() == pytest.approx(64 / 20)


@pytest.mark.parametrize(
    "words",
    [
        ("tuner=lora", "tuner.alpha=10000"),
        pytest.param(("tuner=vera", "tuner.d_initial=10000"), marks=pytest.mark.long),
    ],
)
def test_one_step_that_moves_more_than_all_others_is_withheld(silo, words):
    """A large scale drives the model in one step to where no gradient comes through: that batch alone is told."""
    attacker = silo(8, (*SURE, *words))
    assert "too few rows are behind it (policy.effective_rows)" in attacker.reason(broadcast=sure(attacker, 1))
    unwatched = silo(8, (*SURE, *words), policy={"effective_rows": 0}, run="b" * 16)
    assert unwatched.reason(broadcast=sure(attacker, 1)) == ""
    assert silo(8, (*SURE, "tuner=lora", "tuner.alpha=1"), run="c" * 16).reason() == ""


def test_honest_runs_are_answered(attack):
    attacker = attack((*ALLOWED, "train.epochs=5", "train.lr=0.01"))
    assert attacker.reason() == ""


def test_losses_other_than_cross_entropy_pull_too(attack, monkeypatch):
    """A temperature near 0 lets one row alone pull at MOON's contrast; here its loss reads one row of each batch."""
    # a single epoch is too short: once in a hundred draws one step moves a bias as far as all others together
    words = ("moon", "method.adapters=1", *SURE[2:], "train.epochs=4")
    attacker = attack(words)
    assert attacker.reason() == ""
    whole = MOON.loss
    monkeypatch.setattr(MOON, "loss", lambda self, step: (
        whole(self, step) + 1e6 * (step.views["full"]["mean"] * (step.batch.rows == 7)[:, None]).sum()
    ))  # fmt: skip
    few = "this update; too few rows are behind it (policy.effective_rows)"
    attacker.restart()
    assert few in attacker.reason("round", 2)
    assert few in attack((*words, "train.tokens_at_once=64"), run="b" * 16).reason()


def test_requests_that_end_in_an_error_are_few(attack, monkeypatch):
    """A broadcast can be made so that the loss overflows if some row is there: each error tells that bit."""

    def diverge(*_):
        raise Diverged("silo 'alpha': training diverged")

    attacker = attack((*ALLOWED, "rounds=6"))
    monkeypatch.setattr(LocalTrainer, "rounds", diverge)
    for number in (1, 1, 2, 3):  # a repeated one tells nothing new
        assert "training diverged" in attacker.reason("round", number)
        attacker.restart()
    monkeypatch.undo()
    left = "refuses more requests; too few rows were behind updates, or requests failed (policy.withheld)"
    assert left in attacker.reason("round", 4)
    assert left in attacker.reason("score", 4)
    lines = (Path(attacker.settings.folder) / WITHHELD_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["why"] for line in lines] == ["failed"] * 3
    assert attack((*ALLOWED, "rounds=6"), policy={"withheld": None}).reason("round", 4) == ""


def test_an_update_that_is_not_finite_does_not_leave(attack, monkeypatch):
    """Which of its numbers are not would tell rows."""
    attacker = attack(ALLOWED)
    monkeypatch.setattr(client, "_norm", lambda _: float("nan"))
    reply = attacker.ask("round")
    assert (reply.kind, "the update is not finite" in reply.fields["reason"]) == ("failed", True)
    assert not reply.blobs
