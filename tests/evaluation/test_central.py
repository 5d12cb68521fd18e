"""Partitioned federations: one validation and one test set for all silos, and what the summary makes of them."""

from __future__ import annotations

from collections import Counter

import pytest

from silotune.cli.result_table import result_table
from silotune.evaluation import federation_scores
from silotune.methods.parts import Scope
from silotune.runs.run import run
from tests.support.method_cases import logged
from tests.support.small_runs import save_model

WORDS = (
    *("data.tasks=[alpha]", "partition=dirichlet", "partition.alpha=5", "partition.silos=4"),
    *("rounds=2", "train.lr=0.005", "train.epochs=10"),
)
SHARED = ("head=linear", "head.scope=shared")
SHORT = ("rounds=1", "train.epochs=1")


@pytest.fixture(scope="module")
def runs(tiny_config, tmp_path_factory):
    """`runs(method, word, …)` → (the finished run, how often rows were scored)."""
    made = {}

    def make(method: str, *words: str):
        if (method, *words) not in made:
            calls: Counter = Counter()
            measure = federation_scores.measure

            def counted(training, state, rows, *more):
                calls[id(rows)] += 1
                return measure(training, state, rows, *more)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(federation_scores, "measure", counted)
                config = tiny_config(method, *WORDS, "server.labels_per_class=5", *words)
                made[method, *words] = run(config, out=tmp_path_factory.mktemp("run") / "out"), calls
        return made[method, *words]

    return make


def by_hand(found, silo: str, split: str) -> float:
    """The share of right answers of the silo's public model, over texts read back from token ids."""
    rows = getattr(found.federation.silos[silo].evaluations[silo], split)
    tokenizer = found.federation.backbone.tokenizer
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows.ids]
    names = rows.task.labels
    right = [p.label == names[y] for p, y in zip(found.model(silo).predict(texts), rows.labels.tolist(), strict=True)]
    return 100 * sum(right) / len(right)


@pytest.mark.parametrize("method", ["fedavg", "fedfame"])
def test_a_shared_model_is_judged_once(runs, method):
    found, calls = runs(method, *SHARED)
    summary = found.summary
    silos = [f"silo-{number}" for number in range(1, 5)]
    assert list(summary["silos"]) == silos
    assert summary["global"]["metric"] == "accuracy"
    assert summary["global"]["majority"] == 50.0  # tiny labels go round
    assert summary["average"] == summary["global"]["test"] == pytest.approx(by_hand(found, "silo-2", "test"))
    assert summary["global"]["validation"] == pytest.approx(by_hand(found, "silo-1", "validation"))
    for silo in summary["silos"].values():
        assert (silo["validation"], silo["test"]) == (summary["global"]["validation"], summary["global"]["test"])
        assert (silo["rows"]["validation"], silo["rows"]["test"]) == (20, 20)
    assert sum(silo["rows"]["train"] for silo in summary["silos"].values()) == 60
    assert sorted(calls.values()) == [1, 2]  # test once; validation after each of two rounds


def test_private_heads_are_judged_each_and_averaged(runs):
    found, calls = runs("fedavg", "head.scope=private", "sampling.count=2")
    summary = found.summary
    scores = {name: silo["test"] for name, silo in summary["silos"].items()}
    assert len(set(scores.values())) > 1
    for name, score in scores.items():
        assert score == pytest.approx(by_hand(found, name, "test"))
    assert summary["average"] == summary["global"]["test"] == pytest.approx(sum(scores.values()) / 4)
    validation = [silo["validation"] for silo in summary["silos"].values()]
    assert summary["global"]["validation"] == pytest.approx(sum(validation) / 4)
    assert sorted(calls.values()) == [4, 8]


@pytest.mark.parametrize(("method", "words"), [("fedper", ()), ("fedap", ("head.scope=private",))])
def test_silos_that_never_took_part_are_left_out_of_a_second_average(runs, method, words):
    """Their own heads are untrained, so that they count in `average` with what chance gives."""
    found, _ = runs(method, *words, "sampling.fraction=0.5", *SHORT)
    summary = found.summary
    scores = {name: silo["test"] for name, silo in summary["silos"].items()}
    taken = [name for name, silo in summary["silos"].items() if silo["sampled"]]
    assert len(taken) == 2
    assert summary["average"] == pytest.approx(sum(scores.values()) / 4)
    assert summary["average_sampled"] == pytest.approx(sum(scores[name] for name in taken) / 2)


def test_one_shared_model_has_one_average(runs):
    summary = runs("fedavg", *SHARED, "sampling.fraction=0.5", *SHORT)[0].summary
    assert sum(silo["sampled"] for silo in summary["silos"].values()) == 2
    assert "average_sampled" not in summary


def test_centralised_training_is_judged_on_the_same_rows_once(runs):
    found, calls = runs("centralised", *SHARED[:1])
    assert found.summary["average"] == found.summary["global"]["test"]
    assert sorted(calls.values()) == [1, 2]
    assert {silo["rows"]["train"] for silo in found.summary["silos"].values()} == {60}


@pytest.mark.parametrize("method", ["fedavg", "fedfame"])
def test_the_best_round_is_that_of_the_central_validation_rows(runs, method):
    found, _ = runs(method, *SHARED)
    scores = [event["validation"] for event in logged(found.folder, "round")]
    assert all(score.keys() == {"global"} for score in scores)
    values = [score["global"] for score in scores]
    assert found.summary["best_round"] == 1 + values.index(max(values))
    assert max(values) == found.summary["global"]["validation"]


def test_f1_beside_the_majority(tiny_config, tmp_path):
    """All-positive F1 on half positive rows: 2·½·1 / (½ + 1) = ⅔."""
    config = tiny_config("fedavg", *WORDS, *SHARED, *SHORT, "data.metric=f1", "data.test_rows=19")
    found = run(config, out=tmp_path / "run")
    labels = found.federation.central.test.labels.tolist()
    assert found.summary["global"]["metric"] == "f1"
    positive = sum(labels)
    expected = 100 * 2 * positive / (positive + 19) if positive > 19 - positive else 0.0
    assert found.summary["global"]["majority"] == pytest.approx(expected)


def test_the_table_has_one_line_for_the_one_test_set(runs):
    table = result_table([runs(method, *SHARED)[0].summary for method in ("fedavg", "fedfame")])
    first = list(table.columns[0].cells)
    assert first[:2] == ["4 silos, one test set", "always the most frequent label"]
    assert "silo-1" not in first


@pytest.mark.parametrize("method", ["fedavg", "fedfame"])
def test_silos_rows_are_tokenised_and_kept_once(tiny_federation, method):
    federation = tiny_federation(method, *WORDS, *SHARED, "server.labels_per_class=5", "partition.silos=30")
    found = [rows for silo in federation.silos.values() for rows in silo.evaluations.values()]
    assert len({(id(rows.validation), id(rows.test)) for rows in found}) == 1
    assert federation.central is found[0]


@pytest.mark.parametrize(("head", "one"), [("verbalizer", True), ("linear", False)])
def test_a_head_of_the_silos_own_without_tensors_makes_no_model_of_its_own(tiny_federation, tmp_path, head, one):
    """The verbalizer reads the language model's own logits: under it all silos still predict with one model."""
    backbone = save_model("bert", "masked", tmp_path)
    words = ["method.adapters=1", f"head={head}", "head.scope=private", f"backbone={backbone}"]
    if head == "verbalizer":
        words += ["head.words={bad: awful, good: bright}", "head.template={text} was {mask}."]
    federation = tiny_federation("fedavg", *WORDS[:4], *words)
    assert federation.context.parts["head"].scope is Scope.PRIVATE
    assert federation_scores.all_share_one_model(federation) is one
