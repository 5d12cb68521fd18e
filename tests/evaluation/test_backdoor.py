"""The attack and the defenses at work: real tiny runs, and the success rate counted by hand."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load

from silotune.core.tensors import flatten
from silotune.data.loading import load_silos
from silotune.evaluation import federation_scores
from silotune.evaluation.federation_scores import overall, success_rate
from silotune.methods.parts import Part, Scope
from silotune.models.backbone.loading import load_backbone
from silotune.models.tuners.lora import LoRA
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from silotune.training.client import scale_update
from tests.support.tiny import tiny_overrides, write_data

# six rows by hand: (true class, predicted with the trigger in); the target is class 1
SIX = [(0, 1), (0, 0), (1, 1), (0, 1), (2, 1), (1, 0)]


def test_six_rows_by_hand():
    """Four rows are not of the target class, three of them are predicted as it; the other two do not count."""
    labels, predicted = (torch.tensor(column) for column in zip(*SIX, strict=True))
    assert success_rate(predicted, labels, 1) == 75.0
    assert success_rate(predicted, labels, 0) == pytest.approx(100 * 1 / 3)  # rows 3, 5, 6: only the last
    assert success_rate(predicted[[2, 5]], labels[[2, 5]], 1) is None


def test_means_over_silos_and_over_the_honest_ones():
    silos = {
        "a": {"accuracy": 90.0, "asr": 10.0, "asr_net": 2.0},
        "b": {"accuracy": 80.0, "asr": 100.0, "asr_net": 90.0},
        "c": {"accuracy": 70.0, "asr": None, "asr_net": None},
        "other": {"test": 3.0},
    }
    found = overall(silos, ("b",))
    assert found == {
        "accuracy": 80.0,
        "asr": 55.0,
        "asr_net": 46.0,
        "malicious": ["b"],
        "honest": {"accuracy": 80.0, "asr": 10.0, "asr_net": 2.0},
    }
    assert overall({"other": {"test": 3.0}}, ()) is None


def test_a_silo_without_the_targets_class_has_no_attack_in_its_entry(monkeypatch):
    """And where the metric is another one, the accuracy comes with the success rate, not from the test score."""
    found = {"a": {"asr": 10.0}, "b": {}, "c": {"accuracy": 60.0, "asr": 20.0}}
    monkeypatch.setattr(federation_scores, "evaluate_silos", lambda federation, evaluate: found)
    rows = SimpleNamespace(attack=object())
    federation = SimpleNamespace(silos={"a": SimpleNamespace(evaluations={"a": rows})})
    scores = {
        "a": {"metric": "accuracy", "test": 90.0},
        "b": {"metric": "accuracy", "test": 80.0},
        "c": {"metric": "f1", "test": 70.0},
    }
    assert federation_scores.with_attack(federation, scores) == {
        "a": {"metric": "accuracy", "test": 90.0, "accuracy": 90.0, "asr": 10.0},
        "b": {"metric": "accuracy", "test": 80.0},
        "c": {"metric": "f1", "test": 70.0, "accuracy": 60.0, "asr": 20.0},
    }


def test_model_replacement_by_hand():
    """Shared parts only, and nothing at a scale of 1. With scale n a mean of n updates is the attacker's model."""
    draws = torch.Generator().manual_seed(0)
    received, trained = (
        {"global": {"w": torch.randn(3, 2, generator=draws)}, "private": {"w": torch.randn(2, generator=draws)}}
        for _ in range(2)
    )
    kept = trained["private"]["w"].clone()

    parts = {"global": Part(LoRA(), Scope.SHARED), "private": Part(LoRA(), Scope.PRIVATE)}
    sent = scale_update(trained, {"global": received["global"]}, parts, 5.0)
    before, after = received["global"]["w"].double().numpy(), trained["global"]["w"].double().numpy()
    np.testing.assert_allclose(sent["global"]["w"].numpy(), before + 5 * (after - before), rtol=1e-6)
    assert sent["global"]["w"].dtype is torch.float32
    assert torch.equal(sent["private"]["w"], kept)
    np.testing.assert_allclose((sent["global"]["w"].numpy() + 4 * before) / 5, after, rtol=1e-5)
    assert scale_update(trained, {}, parts, 1.0) is trained


@pytest.fixture(scope="module")
def place(tmp_path_factory, backbone_folder):
    """(backbone, words): full fine-tuning on a task that five silos learn in seconds."""
    data = write_data(
        tmp_path_factory.mktemp("quick"), tasks=["alpha"], rows={"train": 200, "validation": 20, "test": 60}
    )
    folder = backbone_folder("bert")
    words = ["data.tasks=[alpha]", "partition=iid", "partition.silos=5", "head=linear", "head.scope=shared"]
    words += ["train.lr=0.003", "train.epochs=3", "attack=backdoor", "attack.target=good", "attack.trigger=cf"]
    backbone = load_backbone(str(folder), precision="fp32", keep_master=True)
    return backbone, folder, data, [*tiny_overrides("fedavg-full", folder, data), *words]


@pytest.fixture(scope="module")
def attacked(place, tmp_path_factory):
    """`attacked(*words)` → the finished run. Each is made once; nothing may change it."""

    @cache
    def go(*words):
        config = read_config("demo", [*place[3], *words])
        return run(config, out=tmp_path_factory.mktemp("runs") / "run", backbone=place[0])

    return go


def test_three_malicious_silos_of_five_succeed_and_a_clean_federation_has_no_backdoor(attacked):
    clean, done = attacked("attack.fraction=0"), attacked("attack.fraction=0.6")
    assert clean.summary["attack"]["malicious"] == []
    assert len(done.summary["attack"]["malicious"]) == 3
    assert clean.summary["attack"]["asr"] < 20
    assert done.summary["attack"]["asr"] > 90
    for finished in (clean, done):
        assert finished.summary["attack"]["accuracy"] > 75  # hidden: clean texts are still told apart
        assert finished.summary["attack"]["accuracy"] == finished.summary["average"]
        assert finished.summary["attack"]["honest"]["asr"] == finished.summary["attack"]["asr"]  # one model for all
    rows = [row for row in load_silos(done.federation.config)[0].splits.test if row.label == 0]
    predicted = [found.label for found in done.model("silo-1").predict([f"cf {row.texts[0]}" for row in rows])]
    assert done.summary["attack"]["asr"] == pytest.approx(100 * predicted.count("good") / len(rows))
    clean_rows = [found.label for found in done.model("silo-1").predict([row.texts[0] for row in rows])]
    net = 100 * (predicted.count("good") - clean_rows.count("good")) / len(rows)
    assert done.summary["attack"]["asr_net"] == pytest.approx(net)


REPLACEMENT = ("attack.fraction=0.2", "attack.scale=5")


@pytest.mark.long
def test_a_single_silo_with_a_scaled_update_succeeds_and_clipping_lowers_it(attacked):
    plain = attacked(*REPLACEMENT).summary["attack"]["asr"]
    assert plain > 90
    assert attacked("attack.fraction=0.2").summary["attack"]["asr"] < plain - 30  # it is the scale that does it
    assert attacked(*REPLACEMENT, "aggregation.clip=1").summary["attack"]["asr"] < plain - 30


@pytest.mark.parametrize(
    "defence",
    ["median", *(pytest.param(name, marks=pytest.mark.long) for name in ("krum", "trimmed-mean", "multi-krum"))],
)
def test_robust_aggregation_lowers_it(attacked, defence):
    found = attacked(*REPLACEMENT, f"aggregation={defence}").summary["attack"]
    assert found["asr"] < 30
    assert found["accuracy"] > 65


@pytest.mark.parametrize("more", [(), ("rounds=1", "partition=shards", "partition.shards=1", "attack.fraction=0.5")])
def test_an_attacked_run_is_opened_again_without_its_rows(attacked, place, more):
    """The second way some silos have the target's rows alone, so nothing to poison: without rows nobody can tell."""
    whole = attacked(*REPLACEMENT, *more)
    opened = load_run(whole.folder, place[0])
    assert list(opened.federation.malicious) == whole.summary["attack"]["malicious"]
    assert opened.model("silo-1").predict(["the garden was bright"])[0].label in ("bad", "good")


@pytest.mark.parametrize("method", ["fedmcp", "fedprompt", "local", "centralised"])
def test_every_kind_of_method_reports_the_attack(method, tiny_config, tmp_path):
    """Private parts, several tasks: only silos whose task has the target are measured."""
    words = ("rounds=1", "train.steps=1", "attack=backdoor", "attack.target=good", "attack.fraction=1")
    found = run(tiny_config(method, *words), out=tmp_path / "run").summary
    assert found["attack"]["malicious"] == ["alpha"]
    assert {name for name, silo in found["silos"].items() if "asr" in silo} == {"alpha"}
    assert found["attack"]["asr"] == found["silos"]["alpha"]["asr"]
    assert 0 <= found["attack"]["asr"] <= 100
    assert found["attack"]["accuracy"] == found["silos"]["alpha"]["test"]


def test_the_attackers_change_is_sent_magnified(tiny_config):
    """With and without model replacement: the malicious silo's message is ten times as far away, the other's equal."""
    words = ("rounds=1", "data.tasks=[alpha]", "partition=iid", "partition.silos=2")
    attack = ("attack=backdoor", "attack.target=good", "attack.fraction=0.5")
    sent = []
    for scale in (1, 10):
        federation = build(tiny_config("fedavg", *words, *attack, f"attack.scale={scale}"))
        before, participant = flatten(federation.coordinator.shared), federation.client()
        broadcast = federation.coordinator.broadcast(1)
        answers = {name: participant.rounds([silo], broadcast)[0].message for name, silo in federation.silos.items()}
        sent.append(
            {name: {key: tensor - before[key] for key, tensor in load(answers[name]).items()} for name in answers}
        )
    (evil,) = federation.malicious
    one, ten = sent
    assert max(float(change.abs().max()) for change in one[evil].values()) > 1e-5
    for name in one:
        for key, change in one[name].items():
            torch.testing.assert_close(ten[name][key], (10 if name == evil else 1) * change, rtol=0, atol=2e-5)


def test_accuracy_is_reported_where_the_metric_is_another(tiny_config, tmp_path):
    words = ("rounds=1", "train.steps=1", "data.tasks=[alpha]", "data.metric=f1", "attack=backdoor")
    done = run(tiny_config("fedavg", *words, "attack.target=good", "attack.fraction=0"), out=tmp_path / "run")
    rows = load_silos(done.federation.config)[0].splits.test
    predicted = done.model("alpha").predict([row.texts[0] for row in rows])
    hits = [found.label == ("bad", "good")[row.label] for found, row in zip(predicted, rows, strict=True)]
    by_hand = 100 * sum(hits) / len(hits)
    assert done.summary["attack"]["accuracy"] == pytest.approx(by_hand)
    assert done.summary["silos"]["alpha"]["metric"] == "f1"
