"""`scores.json` and `predictions.parquet`: every score again from the rows, and what a coordinator never gets."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import decode
from silotune.runs.run import run
from silotune.runs.storage.scored_rows import PREDICTIONS_FILE, SCORES_FILE
from silotune.runs.summary import average_sampled, averages, mean_test
from tests.support.session_rig import DirectLink, answering, job, local_configs
from tests.support.tiny import ROWS

SHORT = ("rounds=1", "train.steps=2")


def rows_of(folder):
    return pyarrow.parquet.read_table(folder / PREDICTIONS_FILE).to_pylist()


def scores_of(folder):
    return json.loads((folder / SCORES_FILE).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory):
    return run(tiny_config("fedmcp", *SHORT), out=tmp_path_factory.mktemp("run") / "out")


def test_scores_are_those_of_the_predictions(finished):
    predicted, scores = rows_of(finished.folder), scores_of(finished.folder)
    assert Counter(row["silo"] for row in predicted) == dict.fromkeys(finished.silos, ROWS["test"])
    for name, details in scores["silos"].items():
        own = [row for row in predicted if row["silo"] == name]
        task = finished.federation.tasks[name]
        true, said = ([row[key] for row in own] for key in ("label", "predicted"))
        test = finished.federation.silos[name].evaluations[name].test
        assert true == [task.labels[index] for index in test.labels.tolist()]
        assert [row["row"] for row in own] == list(range(ROWS["test"]))
        for row in own:
            assert sum(row["probabilities"]) == pytest.approx(1, abs=1e-6)
            assert task.labels[row["probabilities"].index(max(row["probabilities"]))] == row["predicted"]
        assert details["metrics"]["accuracy"] == pytest.approx(100 * accuracy_score(true, said))
        assert details["metrics"]["macro_f1"] == pytest.approx(100 * f1_score(true, said, average="macro"))
        assert details["confusion"] == confusion_matrix(true, said, labels=list(task.labels)).tolist()
        assert details["score"] == finished.summary["silos"][name]["test"] == details["metrics"]["accuracy"]
        assert finished.summary["intervals"]["silos"][name] == details["intervals"]["accuracy"]
        assert finished.summary["baselines"]["silos"][name].keys() == {"majority", "bag_of_words"}
    assert finished.summary["averages"] == {"accuracy": finished.summary["average"]}


def test_one_model_on_one_set_of_rows_is_written_once(tiny_config, tmp_path):
    words = ("data.tasks=[alpha]", "partition=iid", "partition.silos=4", "head=linear", "head.scope=shared")
    done = run(tiny_config("fedavg", *SHORT, *words), out=tmp_path / "run")
    scores, predicted = scores_of(done.folder), rows_of(done.folder)
    assert scores["silos"] == {}
    assert scores["global"]["score"] == done.summary["global"]["test"]
    assert {row["silo"] for row in predicted} == {None}
    assert len(predicted) == scores["global"]["rows"]
    assert done.summary["intervals"] == {"silos": {}, "global": scores["global"]["intervals"]["accuracy"]}
    assert done.summary["baselines"]["silos"] == {}
    assert done.summary["baselines"]["global"].keys() == {"majority", "bag_of_words"}


def test_all_of_it_can_be_left_out(tiny_config, tmp_path):
    off = ("evaluation.bootstrap=0", "evaluation.baselines=false", "evaluation.predictions=false")
    done = run(tiny_config("local", *SHORT, *off), out=tmp_path / "run")
    assert not (done.folder / PREDICTIONS_FILE).exists()
    assert "baselines" not in done.summary
    assert set(done.summary["intervals"]["silos"].values()) == {None}
    assert scores_of(done.folder)["silos"]["alpha"]["metrics"]["accuracy"] == done.silos["alpha"]["test"]


def test_judged_by_f1_of_a_label(tiny_config, tmp_path):
    config = tiny_config("local", *SHORT, "data.tasks=[alpha]", "data.metric=f1", "data.positive=bad")
    done = run(config, out=tmp_path / "run")
    own = rows_of(done.folder)
    expected = f1_score([row["label"] for row in own], [row["predicted"] for row in own], pos_label="bad")
    assert done.silos["alpha"]["test"] == pytest.approx(100 * expected)
    assert done.summary["tasks"]["alpha"]["positive"] == "bad"


def test_unlike_metrics_have_no_average():
    silos = {
        "a": {"metric": "accuracy", "test": 60.0, "sampled": True},
        "b": {"metric": "macro_f1", "test": 80.0, "sampled": False},
        "c": {"metric": "accuracy", "test": 70.0, "sampled": True},
    }
    assert mean_test(silos) is None
    assert averages(silos) == {"accuracy": 65.0, "macro_f1": 80.0}
    assert average_sampled(silos, alike=False) == {"average_sampled": 65.0}
    assert mean_test({name: silos[name] for name in "ac"}) == 65.0


def test_over_messages_only_scores_leave_and_the_silo_keeps_the_rest(tiny_config, finished, tmp_path):
    config = tiny_config("fedmcp", *SHORT)
    configs = local_configs(config, tmp_path / "run")
    link = DirectLink(answering(configs))
    coordinate(job(config, tmp_path / "run", configs), link)
    for _, data in link.came:
        frame = decode(data)
        assert frame.fields.get("scores", {}).keys() <= {"validation", "test", "rows"}
        assert b"confusion" not in data
        assert b"predicted" not in data
    whole = scores_of(finished.folder)["silos"]
    for name, silo in configs.items():
        (kept,) = [path.parent for path in sorted(tmp_path.rglob(SCORES_FILE)) if str(path).startswith(silo.folder)]
        assert scores_of(kept)["silos"] == {name: whole[name]}
        assert rows_of(kept) == [row for row in rows_of(finished.folder) if row["silo"] == name]
    assert not (tmp_path / "run" / PREDICTIONS_FILE).exists()
