"""`silotune data` and `run --dry-run`: one's own rows, seen before training."""

from __future__ import annotations

import json
from pathlib import Path

from silotune.runs.build.builder import pooling_warnings
from silotune.runs.build.resolve import read_config
from tests.support.command_line import Silotune, change_silo, reviews, tree, write_csv


def test_rows_labels_lengths_and_what_looks_wrong(silotune: Silotune, place: Path) -> None:
    rows = [
        (f"{text}, and more and more of it" if n % 2 else text, "Good" if label == "good" and n % 3 else label)
        for n, (text, label) in enumerate(reviews(40))
    ]
    write_csv(place / "north.csv", ["review", "opinion"], [*rows, *rows])
    change_silo(place, metric="f1", positive="good")
    outcome = silotune("data", "federation.yaml", "train.max_length=10", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    north = found["silos"]["north"]
    assert sum(north["label_rows"]["train"].values()) == north["rows"]["train"] == 48
    assert north["alike"] == [["Good", "good"]]
    assert north["shared"]["test"] > 0
    assert north["tokens"]["maximum"] >= north["tokens"]["median"] > 4
    assert 0 < north["tokens"]["cut"] <= 100
    assert any("look like one: 'Good', 'good'" in warning for warning in found["warnings"])
    assert any("are also training rows" in warning for warning in found["warnings"])
    printed = silotune("data", "federation.yaml", "--silo", "north").out
    share = f"bad {100 * north['label_rows']['train']['bad'] / 48:.0f} %"
    for word in ("F1 of good", share, "warning: silo 'north'", "cut at 32 tokens", "in test"):
        assert word in " ".join(printed.split())


def test_without_a_tokenizer_the_rest_is_shown(silotune: Silotune, place: Path) -> None:
    (place / "empty").mkdir()
    found = json.loads(silotune("data", "federation.yaml", "backbone=empty", "--json").out)
    assert "tokens" not in found["silos"]["north"]
    assert any("no tokenizer there" in warning for warning in found["warnings"])


def test_a_dry_run_builds_and_writes_nothing(silotune: Silotune, place: Path) -> None:
    before = tree(place)
    outcome = silotune("run", "federation.yaml", "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    for word in ("silo north: 12 train", "task south by accuracy", "1 rounds: a silo trains", "nothing was trained"):
        assert word in outcome.out
    assert tree(place) == before
    assert silotune("run", "federation.yaml", "--dry-run", "backbone=nowhere/at-all").code == 2


def test_a_dry_run_of_a_comparison_lists_its_entries_and_names_a_bad_one(silotune: Silotune, place: Path) -> None:
    before = tree(place)
    words = ("compare", "federation.yaml", "methods=local,fedmcp", "seeds=1,2", "--dry-run")
    outcome = silotune(*words)
    assert (outcome.code, outcome.err) == (0, "")
    rows = {line.split()[1]: line for line in outcome.out.splitlines() if line.startswith("│")}
    assert {*rows} == {"local", "fedmcp"}
    assert "1, 2" in rows["local"]
    sent = {entry: line.split("│")[-2].strip() for entry, line in rows.items()}
    assert sent["local"] == "0" != sent["fedmcp"]
    assert "4 runs; nothing was trained" in outcome.out
    bad = silotune(*words, "--variant", "far: backbone=nowhere/at-all")
    bad.refusal("far-1")
    assert tree(place) == before


def test_a_run_begins_with_its_warnings(silotune: Silotune, place: Path) -> None:
    outcome = silotune("run", "federation.yaml", "silos.north.metric=f1", "--out", "out")
    assert outcome.code == 0
    assert "warning: silo 'north': 4 test rows" in outcome.out
    assert "warning: silos have unlike metrics (macro F1, accuracy)" in outcome.out
    summary = json.loads((place / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["average"] is None
    assert summary["averages"].keys() == {"macro_f1", "accuracy"}


def test_the_first_token_of_the_default_backbone_is_warned_of(place: Path) -> None:
    config = read_config("federation.yaml")
    said = {
        (backbone, pooling): bool(pooling_warnings(read_config("federation.yaml", words)))
        for backbone in ("default", config.backbone.name)
        for pooling in ("first", "mean")
        for words in [[f"backbone={backbone}", f"head.pooling={pooling}"]]
    }
    assert [pair for pair, warned in said.items() if warned] == [("default", "first")]
    at_the_mask = read_config("", ["method=fedprompt", "silos=[{name: a, path: .}]"])
    assert (at_the_mask.head.name, at_the_mask.head.pooling) == ("verbalizer", "auto")
    assert pooling_warnings(at_the_mask) == []


def test_the_picture_of_label_shares(silotune: Silotune, place: Path) -> None:
    outcome = silotune("data", "federation.yaml", "--picture", "labels.svg")
    assert (outcome.code, outcome.err) == (0, "")
    assert "shares of labels: labels.svg" in outcome.out
    drawn = (place / "labels.svg").read_text(encoding="utf-8")
    for word in ("north (12)", "bad", "good", "share of the training rows"):
        assert f"<!-- {word}" in drawn, "matplotlib notes every text beside its letters' paths"
    refused = silotune("data", "federation.yaml", "--picture", "labels.txt")
    refused.refusal()


def test_rows_with_labels_have_no_trained_tokens_to_show(silotune: Silotune, place: Path) -> None:
    write_csv(place / "north.csv", ["review", "opinion"], [(text, f"n-{label}") for text, label in reviews(40)])
    for number in (0, 1):
        change_silo(place, number, task="triage")
    printed = silotune("data", "federation.yaml", "--show", 1).out
    assert "tokens\n" in printed
    assert "of them trained" not in printed
    assert "silo 'north': shares no label with 'south', though all are of task 'triage'" in " ".join(printed.split())
    one = silotune("data", "federation.yaml", "--silo", "north").out
    assert "1 silo" in map(str.strip, one.splitlines())
    assert "shares no label" not in one


def test_a_shared_head_is_proposed_unless_silos_have_one(silotune: Silotune) -> None:
    for scope, proposed in (("private", True), ("shared", False)):
        printed = silotune("data", "demo-one-task", f"head.scope={scope}").out
        assert ("proposed: head.scope=shared" in printed) == proposed
