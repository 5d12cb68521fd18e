"""A partitioned data set's held-out rows by how much they count for each silo, against other computations."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pandas
import pytest
import torch
from sklearn import metrics

from silotune.data.loading import load_silos
from silotune.data.own_rows import LEAST, effective_number, label_shares, own_warnings, quotas
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.scores import METRICS, Classified
from silotune.data.tasks import make_task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.predict import Measured, weighed
from silotune.evaluation.score_details import Bootstrap, score_details
from silotune.runs.build.builder import build, run_warnings
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from tests.support.tiny import write_data

DIVIDED = ("data.tasks=[alpha]", "partition=dirichlet", "partition.alpha=1", "partition.silos=3", "rounds=1")


def rows_of(classes: int, count: int, seed: int) -> tuple[Classified, dict[str, np.ndarray]]:
    """Random logits, labels and weights, and what scikit-learn takes of them."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=draws)
    logits = torch.randn(count, classes, generator=draws) + torch.nn.functional.one_hot(labels, classes)
    weights = torch.rand(count, generator=draws, dtype=torch.float64) * (torch.rand(count, generator=draws) > 0.3)
    rows = Classified(logits, labels, 1, weights)
    return rows, {"y_true": labels.numpy(), "y_pred": logits.argmax(-1).numpy(), "sample_weight": weights.numpy()}


@pytest.mark.parametrize(("classes", "seed"), [(2, 1), (2, 2), (5, 3)])
def test_weighted_scores_are_those_of_scikit_learn(classes, seed):
    rows, known = rows_of(classes, 90, seed)
    expected = {
        "accuracy": metrics.accuracy_score(**known),
        "balanced_accuracy": metrics.balanced_accuracy_score(**known),
        "macro_f1": metrics.f1_score(**known, average="macro"),
        "f1": metrics.f1_score(**known, labels=[1], average=None)[0],
        "mcc": metrics.matthews_corrcoef(**known),
    }
    if classes == 2:
        probability = rows.probabilities[:, 1].numpy()
        expected["auroc"] = metrics.roc_auc_score(known["y_true"], probability, sample_weight=known["sample_weight"])
    for name, value in expected.items():
        assert METRICS[name](rows) == pytest.approx(100 * value, abs=1e-9), name
    task = make_task("t", "t", "classification", [str(label) for label in range(classes)], "accuracy")
    shares = torch.linspace(0.2, 1, classes, dtype=torch.float64)
    tokenized = TokenizedRows(task, [[1]] * 90, None, rows.labels, shares=shares)
    weights = shares[rows.labels].numpy()
    loss = metrics.log_loss(known["y_true"], rows.probabilities.numpy(), sample_weight=weights)
    assert weighed(Measured(None, logits=rows.logits), tokenized, "loss").score == pytest.approx(loss)
    details = score_details(Measured(0.0, logits=rows.logits), tokenized, Bootstrap(0, 1))
    assert details is not None
    assert details["metrics"]["log_loss"] == pytest.approx(loss)
    mcc = metrics.matthews_corrcoef(known["y_true"], known["y_pred"], sample_weight=weights)
    assert details["metrics"]["mcc"] == pytest.approx(100 * mcc)


def test_rows_are_resampled_with_their_weights():
    rows, known = rows_of(2, 60, 4)
    low, high = Bootstrap(4000, 1).of_classes(rows)["accuracy"]
    draws = np.random.default_rng(5).integers(60, size=(4000, 60))
    right, weights = known["y_true"] == known["y_pred"], known["sample_weight"]
    shares = 100 * (weights * right)[draws].sum(1) / weights[draws].sum(1)
    assert [low, high] == pytest.approx(np.percentile(shares, [2.5, 97.5]).tolist(), abs=1.0)


@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_a_row_is_drawn_for_all_silos_together(metric):
    """The mean of a silo and of one that is wrong where it is right varies not at all, whatever is drawn."""
    rows = rows_of(2, 60, 4)[0]
    alone, twice = (Bootstrap(500, 1).of_average([rows] * number, metric) for number in (1, 3))
    assert alone == pytest.approx(twice)
    reverse = Classified(-rows.logits, rows.labels, 1, rows.weights)
    assert Bootstrap(500, 1).of_average([rows, reverse], metric) == pytest.approx((50, 50))


def test_weights_are_shares_of_the_training_rows_of_a_label():
    labels, groups = [0, 0, 0, 1, 1, 2, -2], [np.array([0, 1, 3]), np.array([2, 4, 5, 6])]
    shares = label_shares(labels, groups, 4)
    assert shares == pytest.approx(np.array([[2 / 3, 1 / 2, 0, 0], [1 / 3, 1 / 2, 1, 0]]))
    assert effective_number(shares[0], np.array([1, 1, 2, 9])) == pytest.approx((7 / 6) ** 2 / (4 / 9 + 1 / 4))
    assert effective_number(0 * shares[0], np.array([1, 1, 2, 9])) == 0


def test_quotas_are_rounded_by_largest_remainder():
    owners = quotas([50, 30, 21], 10, 1, "test")
    assert Counter(owners.tolist()) == {0: 5, 1: 3, 2: 2}  # 4.95, 2.97, 2.08
    assert (owners == quotas([50, 30, 21], 10, 1, "test")).all()
    assert (owners != quotas([50, 30, 21], 10, 2, "test")).any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("own"), ["alpha"], {"train": 60, "validation": 120, "test": 120})


@pytest.fixture(scope="module")
def runs(tiny_config, folder, tmp_path_factory):
    """`runs(method, which)` → the finished run that is judged on own or shared rows."""
    made = {}

    def make(method: str, which: str):
        if (method, which) not in made:
            words = (*DIVIDED, f"data.path={folder}", f"partition.evaluation={which}", "evaluation.predictions=true")
            config = tiny_config(method, *words, "head.scope=shared")
            made[method, which] = run(config, out=tmp_path_factory.mktemp("run") / "out")
        return made[method, which]

    return make


@pytest.mark.parametrize("method", ["fedavg", "local", "centralised"])
def test_both_columns_come_from_one_model_whatever_judges(runs, method):
    own, shared = (runs(method, which).summary for which in ("own", "shared"))
    assert own["state_sha256"] == shared["state_sha256"]
    assert own["global"] is None
    assert shared["global"] is not None
    for name, entry in own["silos"].items():
        beside = shared["silos"][name]
        assert [entry[key] for key in ("test_own", "test_shared")] == [beside[k] for k in ("test_own", "test_shared")]
        assert (entry["test"], beside["test"]) == (entry["test_own"], pytest.approx(entry["test_shared"]))
    assert own["average"] == pytest.approx(own["average_own"])
    assert shared["average"] == pytest.approx(own["average_shared"])


def test_own_scores_follow_from_the_rows_of_the_run_folder(runs):
    """Weights by hand from the silos' training labels; scores from the predictions, with scikit-learn."""
    found = runs("local", "own")
    rows = pandas.read_parquet(found.folder / "predictions.parquet")
    train = {name: Counter(silo.train["alpha"].labels.tolist()) for name, silo in found.federation.silos.items()}
    names = found.federation.tasks["silo-1"].labels
    for name, of_silo in rows.groupby("silo"):
        share = {label: train[name][i] / sum(of[i] for of in train.values()) for i, label in enumerate(names)}
        weights = of_silo["label"].map(share)
        assert of_silo["weight"].tolist() == pytest.approx(weights.tolist())
        expected = metrics.accuracy_score(of_silo["label"], of_silo["predicted"], sample_weight=weights)
        assert found.summary["silos"][name]["test"] == pytest.approx(100 * expected)
        low, high = found.summary["intervals"]["silos"][name]
        assert low <= 100 * expected <= high
    assert set(found.summary["baselines"]["silos"]) == set(train)


def test_silos_with_few_rows_of_their_own_are_named_and_left_out(tiny_config, folder, tmp_path):
    words = (*DIVIDED, f"data.path={folder}", "partition.evaluation=own", "partition.alpha=0.05", "partition.seed=3")
    found = run(tiny_config("local", *words, "data.test_rows=45", "partition.silos=6"), out=tmp_path / "out")
    silos = load_silos(found.federation.config)
    counted = {silo.name: bool(any(silo.weights["test"])) for silo in silos}
    assert {True, False} == {*counted.values()}, "the test needs both"
    tests = {name: entry["test"] for name, entry in found.summary["silos"].items()}
    assert {name: score is not None for name, score in tests.items()} == counted
    assert found.summary["average"] == pytest.approx(np.mean([score for score in tests.values() if score is not None]))
    (line,) = [
        line
        for line in run_warnings(found.federation.config, silos, found.federation.context)
        if "own" in line and "test" in line
    ]
    assert f"fewer than {LEAST}" in line
    assert all((name in line) != counts for name, counts in counted.items())


def test_weights_travel_with_the_rows_of_a_silo_to_its_own_process(tiny_config, folder, tmp_path):
    (silo, *_) = load_silos(tiny_config("local", *DIVIDED, f"data.path={folder}", "partition.evaluation=own"))
    write_rows(tmp_path / "rows", silo)
    read = read_rows(tmp_path / "rows", silo.name)
    assert read.weights == silo.weights
    alone = build(tiny_config("local", "rounds=1"), data=[read]).silos[silo.name].evaluations[silo.name]
    for split in ("validation", "test"):
        rows = getattr(alone, split)
        assert rows.weights.tolist() == [silo.weights[split][label] for label in rows.labels.tolist()]


def test_a_partition_without_enough_rows_is_refused(tiny_config, folder):
    with pytest.raises(InputError, match=r"partition\.evaluation=own: no silo has 20 test rows"):
        load_silos(
            tiny_config("local", *DIVIDED, f"data.path={folder}", "partition.evaluation=own", "data.test_rows=9")
        )


def test_a_column_says_whose_held_out_rows_are(tiny_config, folder, tmp_path):
    for file in (folder / "alpha").iterdir():
        (tmp_path / "alpha").mkdir(exist_ok=True)
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else []
        kinds = [row | ({} if file.stem == "test" else {"place": "ab"[n % 3 > 1]}) for n, row in enumerate(rows)]
        (tmp_path / "alpha" / file.name).write_text(
            "".join(json.dumps(row) + "\n" for row in kinds) or file.read_text()
        )
    words = ("data.tasks=[alpha]", f"data.path={tmp_path}", "partition=column", "partition.column=place")
    config = tiny_config("local", *words, "partition.evaluation=own")
    a, b = load_silos(config)
    assert [len(silo.splits.validation) for silo in (a, b)] == [80, 40]
    assert {row.group for row in a.splits.validation} == {"a"}
    assert [len(silo.splits.test) for silo in (a, b)] == [120, 120]
    assert list(own_warnings([a, b], config.partition)) == [
        "partition.evaluation=own: test rows have no place, so that all silos share them"
    ]


def test_answers_are_dealt_by_quotas_that_no_method_or_seed_changes(tmp_path, model_folder):
    (tmp_path / "say").mkdir()
    for split, number in (("train", 60), ("validation", 50), ("test", 100)):
        rows = [{"instruction": f"say {n}", "input": "", "output": f"{n}"} for n in range(number)]
        (tmp_path / "say" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"data.path={tmp_path}", f"backbone={model_folder('llama')}", "partition=quantity", "partition.silos=3")

    def dealt(*more: str) -> list[list[str]]:
        own = ("data.seed=1", "partition.seed=5", "partition.evaluation=own")
        config = read_config("feddpa-dataset1", [*words, "data.tasks=[say]", *own, *more])
        return [[row.answer for row in silo.splits.test] for silo in load_silos(config)]

    shares = dealt("method=fedit", "seed=1")
    assert shares == dealt("method=local", "seed=2")
    assert shares != dealt("method=fedit", "partition.seed=6")
    named = sorted(answer for answers in shares for answer in answers)
    assert len(named) == len({*named})
    assert all(len(answers) >= LEAST or not answers for answers in shares)
    assert len(named) > 50
