"""One data set read from a folder or a file and divided: nothing is lost, dev is halved, the preview says the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from silotune.config.trees import merged
from silotune.data.loading import load_silos
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config
from tests.support.command_line import write_csv
from tests.support.tiny import write_data

PREFIX = ("data.set=", "data.tasks=[alpha]", "data.merge=false", "head.scope=shared")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alpha with 61 training and 21 validation rows and no test split; beta too. Every row has a column `domain`."""
    path = write_data(tmp_path_factory.mktemp("glue"), ["alpha", "beta"], {"train": 61, "validation": 21})
    for file in path.rglob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["domain"] = ("shop", "films/tv", "7")[number % 3]
            row["sentence1"] += f" {number}"  # told apart
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def silos_of(folder: Path, *words: str):
    return load_silos(read_config("demo", ["method=fedavg", f"data.path={folder}", *PREFIX, *words]))


def published(folder: Path, split: str) -> Counter:
    lines = (folder / "alpha" / f"{split}.jsonl").read_text().splitlines()
    return Counter((row["sentence1"], row["label"]) for row in map(json.loads, lines))


def counted(rows) -> Counter:
    return Counter((row.texts[0], row.label) for row in rows)


WAYS = [
    ("partition=iid",),
    ("partition=dirichlet", "partition.alpha=0.05"),
    ("partition=dirichlet", "partition.balanced=true"),
    ("partition=quantity", "partition.alpha=0.3"),
    ("partition=shards", "partition.shards=2"),
    ("partition=column", "partition.column=domain"),
]


@pytest.mark.parametrize("words", WAYS)
def test_all_training_rows_are_in_the_silos_and_dev_is_halved(folder, words):
    by_column = words[0] == "partition=column"
    number = () if by_column else ("partition.silos=5",)
    silos = silos_of(folder, *words, *number, "partition.min_rows=3")
    assert sum((counted(silo.splits.train) for silo in silos), Counter()) == published(folder, "train")
    assert [silo.name for silo in silos] == (
        ["7", "films_tv", "shop"] if by_column else [f"silo-{n}" for n in range(1, 6)]
    )
    validation, test = silos[0].splits.validation, silos[0].splits.test
    assert (len(validation), len(test)) == (10, 11)
    assert counted(validation) + counted(test) == published(folder, "validation")
    for silo in silos:  # one set of rows, not a copy per silo
        assert silo.splits.validation is validation
        assert silo.splits.test is test


def test_a_folder_of_ones_own_is_taken_as_it_is_split(folder, tmp_path):
    """Whatever the preset says of merging its own data (the demo merges and cuts 6:2:2)."""
    for name in ("train.jsonl", "validation.jsonl"):
        lines = (folder / "alpha" / name).read_text().splitlines()
        rows = [row | {"label": ("bad", "good")[row["label"]]} for row in map(json.loads, lines)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = {"preset": "demo", "silos": [{"name": "own", "path": str(tmp_path), "text": "sentence1", "label": "label"}]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(text | {"partition": {"name": "iid", "silos": 3}}))
    silos = load_silos(read_config(str(tmp_path / "run.yaml")))
    assert sum(len(silo.splits.train) for silo in silos) == 61
    assert (len(silos[0].splits.validation), len(silos[0].splits.test)) == (10, 11)


def test_seeds(folder):
    """The run's seed moves nothing that data.seed and partition.seed fix."""

    def found(*words: str):
        silos = silos_of(folder, "partition=iid", "partition.silos=4", *words)
        return [silo.splits.train for silo in silos], silos[0].splits.test

    base = found("data.seed=10", "partition.seed=10", "seed=1")
    assert found("data.seed=10", "partition.seed=10", "seed=2") == base
    other_partition, same_test = found("data.seed=10", "partition.seed=11")
    assert (other_partition != base[0], same_test == base[1]) == (True, True)
    assert found("data.seed=11", "partition.seed=10")[1] != base[1]
    assert found("seed=1") != found("seed=2")
    assert found("data.seed=10") == base


def test_rows_caps_before_the_division(folder):
    silos = silos_of(folder, "partition=iid", "partition.silos=4", "data.rows=20", "data.test_rows=5")
    assert [len(silo.splits.train) for silo in silos] == [5, 5, 5, 5]
    assert (len(silos[0].splits.validation), len(silos[0].splits.test)) == (10, 5)


def test_both_splits_are_kept_where_both_are_there(tmp_path):
    folder = write_data(tmp_path / "data", ["alpha"], {"train": 30, "validation": 8, "test": 12})
    splits = silos_of(folder, "partition=iid", "partition.silos=3")[0].splits
    assert (len(splits.validation), len(splits.test)) == (8, 12)


def test_a_file_of_ones_own_is_cut_and_its_train_rows_divided(tmp_path):
    rows = [(f"a {'good' if n % 2 else 'bad'} day {n}", n % 2, f"site{n % 4}") for n in range(100)]
    write_csv(tmp_path / "days.csv", ["text", "label", "site"], rows)
    keys = {"method": "fedavg", "silos": [{"name": "days", "path": "days.csv"}], "head": {"scope": "shared"}}
    path = tmp_path / "own.yaml"
    for partition, names in (
        ({"name": "column", "column": "site"}, ["site0", "site1", "site2", "site3"]),
        ({"name": "iid", "silos": 2}, ["silo-1", "silo-2"]),
    ):
        path.write_text(yaml.safe_dump(keys | {"partition": partition}))
        silos = load_silos(read_config(str(path)))
        assert [silo.name for silo in silos] == names
        train = [row for silo in silos for row in silo.splits.train]
        whole = [*train, *silos[0].splits.validation, *silos[0].splits.test]
        assert (len(train), len(silos[0].splits.validation), len(silos[0].splits.test)) == (60, 20, 20)
        assert counted(whole) == Counter((text, label) for text, label, _ in rows)
        if partition["name"] == "column":
            site = {text: site for text, _, site in rows}
            assert all(site[row.texts[0]] == silo.name for silo in silos for row in silo.splits.train)


def test_another_way_keeps_what_means_something_to_it():
    """The preset's 100 silos of α = 1, under another name; and of a chain of steps those that are left."""
    quantity = read_config("fedavg-peft-sst2", ["partition.alpha=0.3", "partition=quantity"]).partition
    assert (quantity.silos, quantity.alpha, quantity.balanced, quantity.seed) == (100, 0.3, False, 10)
    iid = read_config("fedavg-peft-sst2", ["partition=iid"]).partition
    assert (iid.silos, iid.alpha, iid.seed) == (100, 1.0, 10)
    layers = [{"uplink": {"name": "clip,gaussian", "clip": 2.0, "delta": 1e-6, "epsilon": 3.0}}]
    assert merged([*layers, {"uplink": {"name": ["clip", "laplace"]}}])["uplink"] == {
        "name": ["clip", "laplace"],
        "clip": 2.0,
        "epsilon": 3.0,
    }
    assert merged([*layers, {"uplink": {"name": None}}])["uplink"] == {"name": None}


REFUSED = {
    ("partition=iid", "data.tasks=[alpha,beta]"): r"^partition: divides one labeled data set, found 2 \(alpha, beta\)",
    ("partition=iid", "partition.silos=62"): r"^partition\.min_rows: 62 silos of at least 1 rows need 62 rows",
    ("partition=column",): r"^partition: which column",
    ("partition=column", "partition.column=town"): r"train\.jsonl: no column 'town'; columns: domain, label, sentence1",
    ("partition=column", "partition.column=domain", "partition.min_rows=21"): r"^partition\.min_rows: '7' has only 20",
    ("partition=iid", "partition.shards=3"): r"^partition: shards belongs to partition=shards",
    (
        "partition=iid",
        "partition.alpha=3",
    ): r"^partition: alpha belongs to partition=dirichlet or partition=quantity, n",
    (
        "partition=column",
        "partition.column=domain",
        "partition.silos=3",
    ): r"^partition: silos belongs to partition=iid ",
    ("partition=iid", "data.rows_per_silo=20"): r"^data\.rows_per_silo: not of a data set that is partitioned",
    ("data.rows=20",): r"^data\.rows: of a data set that is partitioned",
    ("partition=dirichlet", "partition.alpha=0"): r"^partition\.alpha: must be greater than 0",
    ("partition=iid", "data.metric=rouge1"): r"data\.metric \('alpha'\)",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_one_line(folder, words):
    with pytest.raises(InputError, match=REFUSED[words]) as refused:
        silos_of(folder, *words)
    assert "\n" not in str(refused.value)


# -- the command ------------------------------------------------------------------------------------------------------


def words_of(folder: Path, *more: str) -> list[str]:
    return ["partition", "demo", "method=fedavg", f"data.path={folder}", *PREFIX, *more]


def test_preview_as_json_is_what_a_run_would_load(silotune, folder):
    words = ("partition=dirichlet", "partition.alpha=0.2", "partition.silos=4")
    outcome = silotune(*words_of(folder, *words), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    preview = json.loads(outcome.out)
    silos = silos_of(folder, *words)
    assert preview["rows"] == 61
    assert preview["labels"] == ["bad", "good"]
    assert (preview["validation"], preview["test"]) == (10, 11)
    assert list(preview["silos"]) == [silo.name for silo in silos]
    for silo in silos:
        labels = Counter(row.label for row in silo.splits.train)
        assert preview["silos"][silo.name] == {
            "rows": len(silo.splits.train),
            "labels": {"bad": labels[0], "good": labels[1]},
        }
    assert {key: preview["partition"][key] for key in ("name", "alpha", "silos")} == {
        "name": "dirichlet",
        "alpha": 0.2,
        "silos": 4,
    }


def test_preview_for_people_and_its_heatmap(silotune, folder, tmp_path):
    out = tmp_path / "silos.png"
    outcome = silotune(*words_of(folder, "partition=shards", "partition.silos=3"), "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    for word in ("silo-1", "silo-3", "bad", "good", "61", "10 validation and 11 test rows", str(out)):
        assert word in outcome.out
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_heatmap_needs_a_place(silotune, folder, tmp_path):
    for out in (tmp_path / "nowhere" / "x.png", tmp_path / "x.pdf"):
        outcome = silotune(*words_of(folder, "partition=iid"), "--out", out)
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
        assert not out.exists()
