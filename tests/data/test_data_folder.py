"""`data.path`: tasks of a folder as silos, and silos of one task under common label names."""

from __future__ import annotations

import json
from pathlib import Path

from silotune import read_config
from silotune.data.loading import load_silos
from silotune.data.rows import SiloData


def loaded(*words: str) -> dict[str, SiloData]:
    return {silo.name: silo for silo in load_silos(read_config("demo", list(words)))}


def sentiment5(folder: Path) -> Path:
    """Five domains whose first label has two names, as in the published sets."""
    for name in ("amazon", "imdb", "movie_snippets", "nyt_editorials", "tweets"):
        (folder / name).mkdir()
        names = ["negative" if name == "imdb" else "negative_or_zero", "positive"]
        (folder / name / "meta.json").write_text(json.dumps({"label_names": names}), encoding="utf-8")
        for split, count in (("train", 30), ("test", 10)):
            lines = [json.dumps({"sentence1": f"{name} {split} {i}", "label": i % 2}) for i in range(count)]
            (folder / name / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_every_folder_is_a_silo_in_alphabetic_order_or_that_of_the_key(data_folder: Path) -> None:
    silos = loaded(f"data.path={data_folder}", "data.tasks=[]", "data.merge=false")
    assert list(loaded(f"data.path={data_folder}", "data.tasks=gamma,alpha", "data.merge=false")) == ["gamma", "alpha"]
    assert list(silos) == ["alpha", "beta", "gamma"]
    assert silos["gamma"].task.labels == ("yes", "maybe", "no")
    assert all(silo.task.name == name for name, silo in silos.items())
    assert all(silo.splits.counts() == {"train": 60, "validation": 20, "test": 20} for silo in silos.values())


def test_tasks_may_have_blanks_between() -> None:
    assert read_config("demo", ["data.tasks=beta, alpha"]).data.tasks == ["beta", "alpha"]
    config = read_config("demo", ["evaluation.test_time=true", "evaluation.unseen=beta , alpha"])
    assert config.evaluation.unseen == ["beta", "alpha"]


def test_labels_are_indices_into_the_names_of_meta(data_folder: Path) -> None:
    silo = loaded(f"data.path={data_folder}", "data.tasks=gamma", "data.merge=false")["gamma"]
    lines = (data_folder / "gamma" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    expected = {((row["sentence1"], row["sentence2"]), row["label"]) for row in map(json.loads, lines)}
    assert {(row.texts, row.label) for row in silo.splits.train} == expected


def test_the_preset_sentiment5_is_one_task_under_one_pair_of_names(tmp_path: Path) -> None:
    silos = load_silos(read_config("sentiment5", [f"data.path={sentiment5(tmp_path)}"]))
    assert len(silos) == 5
    assert {(silo.task.name, silo.task.labels) for silo in silos} == {("sentiment", ("negative", "positive"))}
    for silo in silos:
        assert all(int(row.texts[0].split()[-1]) % 2 == row.label for row in silo.splits.train)
