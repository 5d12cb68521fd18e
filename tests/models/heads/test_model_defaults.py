"""Keys of the head that follow from the model: how texts are pooled, and which template asks."""

from __future__ import annotations

import json

import pyarrow.parquet
import pytest
import yaml

from silotune.config.backbone import BackboneConfig
from silotune.errors import InputError
from silotune.models.backbone.stored_model import has_chat_template, pooling_of
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from tests.support.tiny import save_backbone, tiny_overrides


@pytest.mark.parametrize(
    ("family", "noted", "pooling"),
    [
        ("bert", None, "first"),
        ("bert", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ("bert", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "first"),
        ("t5", None, "first"),
        ("gpt2", None, "last"),
        ("llama", None, "last"),
    ],
)
def test_pooling_is_the_models(family, noted, pooling, model_folder, tmp_path):
    folder = save_backbone(family, tmp_path / family) if family == "bert" else model_folder(family)
    if noted:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(noted))
    assert pooling_of(BackboneConfig(name=str(folder)), None) == pooling


def test_the_default_backbone_is_read_by_the_mean():
    assert pooling_of(BackboneConfig(name="default"), None) == "mean"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["method=fedavg", "head.pooling=first"], "head.pooling=first: the first token of .* has seen no other"),
        (["method=moon", "method.representation=first"], "method.representation=first"),
    ],
)
def test_the_first_token_of_a_causal_model_is_refused(words, refusal, model_folder, data_folder):
    given = tiny_overrides(words[0].removeprefix("method="), model_folder("llama"), data_folder)
    with pytest.raises(InputError, match=refusal):
        build(read_config("demo", [*given, *words]))


def test_a_causal_classifier_tells_texts_apart(model_folder, data_folder, tmp_path):
    words = ["head.pooling=auto", "rounds=1", "train.steps=1", "data.tasks=[alpha]"]
    finished = run("demo", *tiny_overrides("local", model_folder("llama"), data_folder), *words, out=tmp_path / "run")
    assert finished.federation.config.head.pooling == "last"
    name = next(iter(finished.federation.tasks))
    texts = ["the garden was warm", "the garden was grim", "the soup"]
    found = load_run(finished.folder).model(name).predict(texts)
    assert len({tuple(one.probabilities.values()) for one in found}) == 3


@pytest.mark.parametrize(
    ("family", "template", "opening"), [("chat", "chat", "say "), ("llama", "plain", "### Instruction:\nsay ")]
)
def test_a_model_is_asked_by_its_own_template(family, template, opening, model_folder, tmp_path, monkeypatch, silotune):
    """It is named before the first round, and is in the run's folder, where predictions have their prompts."""
    rows = [{"instruction": f"say {n}", "output": "warm"} for n in range(12)]
    (tmp_path / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "method": "fedit",
        "tuner": {"name": "lora", "r": 2},
        "head": {"name": "lm", "max_new_tokens": 4},
        "precision": "fp32",
        "rounds": 1,
        "train": {"steps": 1, "batch_size": 4, "max_length": 60},
        "silos": [{"name": name, "path": "say.jsonl"} for name in ("east", "west")],
    }
    (tmp_path / "say.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.chdir(tmp_path)
    folder = model_folder(family)
    assert has_chat_template(BackboneConfig(name=str(folder)), None) == (template == "chat")
    outcome = silotune("run", "say.yaml", f"backbone={folder}", "--out", "out", "--quiet")
    assert outcome.code == 0, outcome.err
    assert f"(head.template={template})" in outcome.out
    kept = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert kept["head"]["template"] == template
    asked = run("say.yaml", f"backbone={folder}", f"head.template={template}", out="named")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert asked.summary["state_sha256"] == summary["state_sha256"]
    rows = pyarrow.parquet.read_table(asked.folder / "predictions.parquet").to_pylist()
    assert all(opening in row["prompt"] and "warm" not in row["prompt"] for row in rows)
