"""Exports of models that mark spans: opened by transformers, peft, the loader and onnxruntime, with equal logits."""

from __future__ import annotations

import json
import re

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForTokenClassification

from silotune.evaluation.predict import logits
from silotune.interop.export import export
from silotune.interop.onnx_model import onnx_logits
from silotune.runs.marked_texts import MarkedTexts
from tests.support.small_runs import SINGLE, carried_along, close, encoded, own_logits, tokenised

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def expected(run) -> list[torch.Tensor]:
    reads = tokenised(run, "beta", SINGLE).reads
    return [*torch.split(own_logits(run, "beta", SINGLE), [len(places) for places in reads])]


def at_words(run, found) -> list[torch.Tensor]:
    return [own[places] for own, places in zip(found, tokenised(run, "beta", SINGLE).reads, strict=True)]


@torch.no_grad()
def logits_of(model, folder):
    return model.eval()(**encoded(folder, SINGLE)).logits


@pytest.mark.parametrize(
    ("family", "tuner"),
    [
        ("bert", "lora"),
        ("llama", "lora"),
        ("bert", "vera"),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("gpt2", "dora"), ("roberta", "ia3"))),
    ],
)
def test_peft_opens_adapter_and_last_layer(runs, family, tuner, tmp_path):
    run = runs.entities(family, tuner)
    about = export(run.model("beta"), "global", tmp_path / "out")
    assert about["comparison"]["largest_difference"] < 1e-5
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["task_type"] == "TOKEN_CLS"
    base = AutoModelForTokenClassification.from_pretrained(runs.model(family), id2label=dict(enumerate(TAGS)))
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    close(at_words(run, logits_of(model, tmp_path / "out")), expected(run))


def test_merged_opens_by_its_folder_alone(runs, tmp_path):
    run = runs.entities("bert", "lora", "method=fedmatch")
    export(run.model("beta"), "merged", tmp_path / "out")
    model, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not {*report["missing_keys"], *report["unexpected_keys"]}
    assert [*model.config.id2label.values()] == TAGS
    close(at_words(run, logits_of(model, tmp_path / "out")), expected(run))


@pytest.mark.parametrize("tuner", ["lora", "bottleneck", "prompt"])
def test_the_loader_marks_what_the_silo_does(runs, tuner, tmp_path):
    run = runs.entities("bert", tuner)
    export(run.model("beta"), "global", tmp_path / "out")
    model = carried_along(tmp_path / "out").load(tmp_path / "out")
    close(at_words(run, model.logits(SINGLE)), expected(run))
    model.head_tensors["out.bias"] = torch.tensor([0.0, 0.0, 0.0, 1000.0, 0.0])  # every word is a span of its own
    spans = model.predict(["the garden,", ""])
    assert spans[0]["spans"] == [{"start": a, "end": b, "label": "LOC"} for a, b in ((0, 3), (4, 10), (10, 11))]
    assert spans[1]["spans"] == []


@pytest.mark.parametrize("words", [(), ("data.long_texts=windows", "data.window_overlap=2")])
def test_a_text_that_does_not_fit_is_read_in_the_windows_of_predict(runs, words, tmp_path):
    run, texts = runs.entities("bert", "lora", "train.max_length=9", *words), [" ".join(SINGLE), *SINGLE]
    about = export(run.model("beta"), "global", tmp_path / "out")
    assert about["comparison"]["same_answers"] == 4
    model = carried_along(tmp_path / "out").load(tmp_path / "out")
    marked = MarkedTexts(run.model("beta").context, run.federation.tasks["beta"], texts)
    expected = logits(run.federation.context, run.model("beta").state, marked.rows)
    found = model.logits(texts)
    assert found.shape[1] > len(encoded(tmp_path / "out", texts)["input_ids"][0]), "windows have tokens in common"
    close(torch.cat([own[places] for own, places in zip(found, marked.rows.reads, strict=True)]), expected)
    model.head_tensors["out.bias"] = torch.tensor([0.0, 0.0, 0.0, 1000.0, 0.0])  # every word is a span of its own
    spans = model.predict(texts)[0]["spans"]
    assert [(span["start"], span["end"]) for span in spans] == [word.span() for word in re.finditer(r"\S+", texts[0])]


@pytest.mark.long
def test_an_onnx_graph_scores_tokens(runs, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    run = runs.entities("bert", "lora")
    assert export(run.model("beta"), "merged", tmp_path / "out", program="onnx")["comparison"]["same_answers"] == 4
    close(at_words(run, onnx_logits(tmp_path / "out", SINGLE)), expected(run))
