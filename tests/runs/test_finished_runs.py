"""`load_run` and `silotune predict`: a finished run answers as it did, without its data and without training."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys

import pyarrow.parquet
import pytest

import silotune as library
from silotune.cli import predict
from silotune.communication.privacy import accountant as accounting
from silotune.runs.personal_model import load_model
from silotune.training.local_trainer import LocalTrainer
from tests.support.command_line import Silotune
from tests.support.method_cases import every_method
from tests.support.small_runs import PAIRS, SINGLE
from tests.support.tiny import tiny_overrides


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@every_method
def test_a_loaded_run_predicts_bit_for_bit_as_it_did(reference, silos_folder, method, tmp_path, monkeypatch):
    ran, _ = reference(method)
    run = shutil.copytree(ran.folder, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    assert str(silos_folder) in config
    (run / "config.yaml").write_text(config.replace(str(silos_folder), str(tmp_path / "nowhere")))
    monkeypatch.setattr(LocalTrainer, "rounds", None)  # nothing may be trained
    again = library.load_run(run)
    assert again.summary == ran.summary == json.loads((run / "summary.json").read_text())
    assert again.silos == ran.silos
    assert ran.silos
    for silo in ran.silos:
        model = ran.model(silo)
        texts = PAIRS if model.texts_per_row == 2 else SINGLE
        assert again.model(silo).predict(texts) == model.predict(texts)
        assert load_model(run, silo).predict(texts) == model.predict(texts)


@pytest.mark.parametrize(
    "noise",
    [
        ("uplink=clip,gaussian", "uplink.epsilon=8"),
        ("aggregation.clip=1", "aggregation.noise_multiplier=1"),
        ("uplink=clip,gaussian", "uplink.epsilon=8", "privacy.epsilon=1000"),
    ],
)
def test_a_noised_run_is_opened_without_its_accountant(runs, noise, tmp_path, monkeypatch):
    words = [*tiny_overrides("fedavg", runs.model("bert"), runs.data), "data.tasks=[alpha]", "train.steps=2"]
    ran = library.run("demo", *words, *noise, out=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # not installed
    for found in vars(accounting).values():
        if hasattr(found, "cache_clear"):
            found.cache_clear()
    assert library.load_run(tmp_path / "run").model("alpha").predict(SINGLE) == ran.model("alpha").predict(SINGLE)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "versions.json").write_text("[]"), "versions.json: missing or damaged"),
        (lambda run: _drop(run, "tasks"), "summary.json: missing or damaged"),
        (lambda run: _drop(run, "best_round"), "summary.json: missing or damaged ('best_round')"),
        (lambda run: next(run.glob("checkpoints/shared*")).write_bytes(b"x"), "missing or damaged"),
    ],
)
def test_no_models_are_made_of_a_damaged_run_folder(silotune: Silotune, runs, spoil, message, tmp_path):
    run = shutil.copytree(runs.run("bert", "lora").folder, tmp_path / "run")
    spoil(run)
    outcome = silotune("import", run)
    outcome.refusal(message)
    assert outcome.out == ""


def _drop(run, key):
    summary = json.loads((run / "summary.json").read_text())
    del summary[key]
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("source", ["text", "file", "stdin"])
def test_predict_prints_a_json_line_a_text(silotune: Silotune, runs, source, tmp_path, monkeypatch):
    run = runs.run("bert", "lora")
    texts, words = SINGLE, []
    if source == "text":
        texts = ["the garden\twas «kind»"]  # a tab belongs to a single text
        words = ["--text", texts[0]]
    elif source == "file":
        (tmp_path / "texts.txt").write_text("\ufeff" + "\r\n\n".join(SINGLE) + "\n", encoding="utf-8")
        words = ["--file", tmp_path / "texts.txt"]
    else:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(SINGLE).encode())))
    outcome = silotune("predict", run.folder, "--silo", "alpha", *words)
    assert (outcome.code, outcome.err) == (0, "")
    lines = lines_of(outcome.out)
    assert [list(line) for line in lines] == [["text", "label", "probabilities"]] * len(texts)
    assert [line["text"] for line in lines] == texts
    for line, one in zip(lines, run.model("alpha").predict(texts), strict=True):
        assert (line["label"], line["probabilities"]) == (one.label, pytest.approx(one.probabilities, abs=1e-6))
        assert sum(line["probabilities"].values()) == pytest.approx(1)


def test_another_precision_is_that_of_load_model(silotune: Silotune, runs):
    folder = runs.run("bert", "lora").folder
    outcome = silotune("predict", folder, "--silo", "alpha", "--precision", "bf16", "--text", SINGLE[0])
    (line,) = lines_of(outcome.out)
    (same,) = load_model(folder, "alpha", precision="bf16").predict(SINGLE[:1])
    (other,) = load_model(folder, "alpha").predict(SINGLE[:1])
    assert line["probabilities"] == pytest.approx(same.probabilities, abs=1e-6)
    assert line["probabilities"] != pytest.approx(other.probabilities, abs=1e-6)


def test_pairs_by_tab_or_json(silotune: Silotune, runs, tmp_path):
    run = runs.run("bert", "lora")
    (tmp_path / "pairs").write_text(
        "the garden was kind\tand warm\n"
        '["the garden was kind", "and warm"]\n'
        '{"sentence1": "the garden was kind", "sentence2": "and warm", "label": 1}\n'
    )
    outcome = silotune("predict", run.folder, "--silo", "beta", "--file", tmp_path / "pairs")
    lines = lines_of(outcome.out)
    assert len(lines) == 3
    assert lines[0]["text"] == ["the garden was kind", "and warm"]
    for line in lines[1:]:
        assert line["text"] == lines[0]["text"]
        assert line["probabilities"] == pytest.approx(lines[0]["probabilities"], abs=1e-6)


def test_answers_of_a_generation_task(silotune: Silotune, runs):
    run = runs.generation("gpt2", "causal", "lora")
    outcome = silotune("predict", run.folder, "--silo", "east", "--text", "say a river 2")
    assert (outcome.code, outcome.err) == (0, "")
    assert lines_of(outcome.out) == [{"text": "say a river 2", "answer": run.model("east").write(["say a river 2"])[0]}]
    without = silotune("predict", run.folder, "--silo", "east", "--text", '["say a river 2", ""]')
    assert (without.code, without.err) == (0, "")
    assert lines_of(without.out)[0]["answer"] == lines_of(outcome.out)[0]["answer"], "an input may be empty"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--silo", "bet", "--text", "x"], "unknown silo 'bet'"),
        (["--silo", "beta", "--text", "one text"], "--text line 1: needs two texts, with a tab between, or JSON"),
        (["--silo", "beta", "--text", "a\tb\tc"], "needs two texts"),
        (["--silo", "alpha", "--text", '["a", "b"]'], "needs one text"),
        (["--silo", "alpha", "--text", '["a", 3]'], "needs one text"),
        (["--silo", "alpha", "--text", " "], "--text: is empty"),
        (["--silo", "alpha", "--text", '""'], "--text line 1: a text is empty"),
        (["--silo", "beta", "--text", "one text\t"], "--text line 1: a text is empty"),
        (["--silo", "alpha", "--text", r'"\ud800"'], "--text line 1: a text holds half a character"),
        (["--silo", "alpha", "--text", "caf\udce9"], "--text line 1: a text holds half a character"),
        (["--silo", "beta", "--text", r'["a", "b\u0000"]'], "--text line 1: a text holds a NUL character"),
        (["--silo", "alpha", "--file", "nul.txt"], "nul.txt line 2: a text holds a NUL character"),
        (["--silo", "alpha", "--text", "x", "--file", "y"], "--text and --file exclude each other"),
        (
            ["--silo", "alpha", "--file", "nowhere.txt"],
            "--file nowhere.txt: cannot be read (No such file or directory)",
        ),
        (["--silo", "alpha", "--text", "x", "--text", ""], "--text: is empty"),
        (["--silo", "alpha", "--text", "x", "--precision", "bf61"], "unknown precision 'bf61' (did you mean 'bf16'?)"),
        (["--silo", "alpha", "--file", "blank.txt"], "--file blank.txt: holds no text"),
        (["--silo", "alpha", "--file", "latin.txt"], "--file latin.txt: not UTF-8 (byte 3)"),
        (["--silo", "alpha", "--text", "a", "--columns", "text"], "--columns: belongs to a --file that is a table"),
        (
            ["--silo", "alpha", "--file", "new.tsv", "--columns", "a,b"],
            "2 columns, but a row of this silo's task has 1",
        ),
        (
            ["--silo", "alpha", "--file", "missing.csv"],
            "--file missing.csv: cannot be read (No such file or directory)",
        ),
        (["--silo", "alpha", "--text", "a", "--out", "new.txt"], "--out new.txt: unknown format '.txt'; allowed: .csv"),
        (["--silo", "alpha", "--text", "a", "--out", "new.tsv"], "--out new.tsv: already there"),
    ],
)
def test_predict_refuses_in_one_line(silotune: Silotune, runs, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "blank.txt").write_text("\n \n", encoding="utf-8")
    (tmp_path / "nul.txt").write_bytes(b"\nwords\0\n")
    (tmp_path / "new.tsv").write_text("a\tb\nx\ty\n")
    outcome = silotune("predict", runs.run("bert", "lora").folder, *words)
    outcome.refusal(message)
    assert outcome.out == ""


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_predict_writes_what_it_prints_to_a_file(silotune: Silotune, runs, tmp_path, monkeypatch, ending):
    """Of many rows, in portions: a table of each format in, and out; the file is there once all is written."""
    monkeypatch.setattr(predict, "_BATCH_SIZE", 2)
    run, texts = runs.run("bert", "lora"), [f"{text} {number}" for number, text in enumerate(SINGLE * 2)]
    table, answers = tmp_path / f"in.{ending}", tmp_path / f"out.{ending}"
    if ending == "csv":
        table.write_text("sentence1,note\n" + "".join(f"{text},x\n" for text in texts))
    elif ending == "jsonl":
        table.write_text("".join(json.dumps({"sentence1": text}) + "\n" for text in texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"sentence1": texts}), table)
    words = ("predict", run.folder, "--silo", "alpha", "--file", table)
    expected = lines_of(silotune(*words).out)
    outcome = silotune(*words, "--out", answers)
    assert (outcome.code, outcome.out) == (0, f"wrote {answers}: answers to 6 texts\n")
    if ending == "csv":
        with answers.open(newline="") as file:
            found = [row | {"probabilities": json.loads(row["probabilities"])} for row in csv.DictReader(file)]
    elif ending == "jsonl":
        found = lines_of(answers.read_text())
    else:
        found = pyarrow.parquet.read_table(answers).to_pylist()
    assert found == expected
    assert [row["text"] for row in expected] == texts
    assert {*tmp_path.iterdir()} == {table, answers}


def test_predict_reads_the_text_column_of_a_table(silotune: Silotune, runs, tmp_path):
    run = runs.run("bert", "lora")
    table = tmp_path / "new.csv"
    table.write_text('id,label,sentence1\n1,no,"the garden, and\nthe river"\n2,,a kind river\n', encoding="utf-8")
    texts = ["the garden, and\nthe river", "a kind river"]
    outcome = silotune("predict", run.folder, "--silo", "alpha", "--file", table)
    assert [line["text"] for line in lines_of(outcome.out)] == texts
    assert [line["label"] for line in lines_of(outcome.out)] == [one.label for one in run.model("alpha").predict(texts)]
    table.write_text("id,note\n1,a kind river\n", encoding="utf-8")
    outcome = silotune("predict", run.folder, "--silo", "alpha", "--file", table)
    assert (outcome.code, outcome.out) == (2, "")
    assert "no column 'sentence1'; columns: id, note" in outcome.err
    outcome = silotune("predict", run.folder, "--silo", "alpha", "--file", table, "--columns", "note")
    assert [line["text"] for line in lines_of(outcome.out)] == ["a kind river"]
