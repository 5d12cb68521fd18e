"""The untouched backbone: as a baseline in every table, as a run without rounds, and without a run."""

from __future__ import annotations

import json

import pyarrow.parquet
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from silotune.data.rows import Row
from silotune.data.scores import rouge1
from silotune.data.tasks import make_task
from silotune.errors import InputError
from silotune.evaluation.untouched import with_shots
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.table_files import write_tables
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run

WORDS = ("warm", "cold", "sweet")


@pytest.fixture(scope="module")
def place(tmp_path_factory, model_folder):
    """A folder with `say.yaml`, a federation of two silos of instructions."""
    folder = tmp_path_factory.mktemp("say")
    rows = [{"instruction": f"say {WORDS[n % 3]} {n}", "output": WORDS[n % 3]} for n in range(30)]
    (folder / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "method": "fedit",
        "backbone": str(model_folder("llama")),
        "tuner": {"name": "lora", "r": 2},
        "head": {"name": "lm", "max_new_tokens": 4},
        "precision": "fp32",
        "threads": 1,
        "rounds": 1,
        "train": {"steps": 2, "lr": 0.1, "batch_size": 4, "max_length": 80},
        "silos": [{"name": name, "path": "say.jsonl", "task": "say"} for name in ("east", "west")],
    }
    (folder / "say.yaml").write_text(yaml.safe_dump(keys))
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)


@pytest.fixture(scope="module")
def finished(place):
    return run(str(place / "say.yaml"), out=place / "trained")


def test_the_baseline_is_what_transformers_generates(finished, model_folder, place):
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama")).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    rows = pyarrow.parquet.read_table(place / "trained" / "predictions.parquet").to_pylist()
    own = [row for row in rows if row["silo"] == "east"]
    written = []
    for row in own:
        ids = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            answer = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        written.append(tokenizer.decode(answer, skip_special_tokens=True))
    scores = finished.summary["baselines"]["silos"]["east"]
    assert scores == {"untouched": pytest.approx(rouge1(written, [row["label"] for row in own]))}


@pytest.mark.usefixtures("no_figures")
def test_it_has_a_row_in_tables(finished, place, silotune, tmp_path):
    """In a report, and in the tables of a comparison."""
    assert silotune("report", "trained", "--out", "page.html").code == 0
    assert "untouched backbone" in (place / "page.html").read_text()
    write_tables(Results(read_entries([finished.folder])), tmp_path)
    for name in ("table.md", "baselines.csv"):
        assert "untouched backbone" in (tmp_path / name).read_text()


@pytest.mark.parametrize("tuner", ["lora", "prompt"])
def test_a_run_without_rounds_is_that(tuner, finished, place):
    """Its models answer as the backbone does, whatever a tuner's first values are."""
    bare = run("say.yaml", "rounds=0", f"tuner={tuner}", out=f"bare-{tuner}")
    baseline = finished.summary["baselines"]["silos"]
    assert {name: silo["test"] for name, silo in bare.summary["silos"].items()} == {
        name: scores["untouched"] for name, scores in baseline.items()
    }
    assert bare.summary["best_round"] == bare.summary["bytes_up"] == 0
    asked = ["say warm 1", "say something else"]
    model = load_run(place / f"bare-{tuner}").model("east")
    assert model.write(asked) == load_run(place / "trained").model("east").untouched(asked)


def test_heads_with_tensors_are_refused(tiny_config, tmp_path):
    with pytest.raises(InputError, match=r"rounds=0: .* head=mlp has tensors that no round has trained"):
        run(tiny_config("fedavg", "rounds=0"), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        (
            "llama",
            "<s>### Instruction:\nsay a\n\n### Response:\na\n\n### Instruction:\nsay b\nloud\n\n### Response:\nb\n\n"
            "### Instruction:\nsay c\n\n### Response:\n",
        ),
        (
            "chat",
            "<|im_start|>user\nsay a<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nsay b\nloud"
            "<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nsay c<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)
def test_rows_before_a_question(family, prompt, model_folder):
    context = build(read_config("say.yaml", [f"backbone={model_folder(family)}"])).context
    task = make_task("say", "test", "generation")
    shown = [Row(("say a", ""), 0, "a"), Row(("say b", "loud"), 0, "b")]
    rows = with_shots(context, task, shown)(task, [Row(("say c", ""), 0, "c")])
    assert context.backbone.tokenizer.decode(rows.ids[0][: rows.prompts[0]]) == prompt


def test_rows_that_do_not_fit_are_refused(model_folder):
    context = build(read_config("say.yaml", [f"backbone={model_folder('gpt2')}"])).context
    task = make_task("say", "test", "generation")
    with pytest.raises(InputError, match=r"evaluation\.shots: 20 rows take up to"):
        with_shots(context, task, [Row(("say a", ""), 0, "a")] * 20)


def test_without_a_run(finished, model_folder, place, silotune):
    asked = ("evaluate", model_folder("llama"), "precision=fp32", "head.max_new_tokens=4", "train.max_length=80")
    words = (*asked, "--json")
    outcome = silotune(*words, "--data", "say.yaml")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert {name: scores["score"] for name, scores in found.items()} == {
        name: scores["untouched"] for name, scores in finished.summary["baselines"]["silos"].items()
    }
    of_file = json.loads(silotune(*words, "--data", "say.jsonl").out)
    assert of_file["rows"]["rows"] == 30
    after_two = json.loads(silotune(*words, "--data", "say.jsonl", "--shots", "1").out)
    assert after_two["rows"]["rows"] == 29
    printed = silotune(*asked, "--data", "say.jsonl").out
    assert "head.template=plain" in printed
    assert "untouched" in printed
    assert silotune("evaluate", "trained", "--file", "say.jsonl").code == 2


def test_templates_are_compared_on_validation_rows(model_folder, silotune):
    words = ("data", "say.yaml", "--templates", f"backbone={model_folder('chat')}", "train.max_length=120")
    found = json.loads(silotune(*words, "--json").out)
    assert found["split"] == "validation"
    assert {*found["silos"]["east"]} == {"chat", "plain"}
    assert found["proposed"] in ("chat", "plain")
    assert f"proposed: head.template={found['proposed']}" in silotune(*words).out
    refused = silotune("data", "say.yaml", "--templates")
    assert refused.code == 2
    assert "has no chat template" in refused.err
