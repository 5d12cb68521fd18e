"""Validation by the held-out loss: the loss of an independent computation, no written answers, the lowest is best."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from silotune.data.rows import Row, SiloData, Splits
from silotune.data.scores import LOSS_SCORES
from silotune.data.tasks import make_task
from silotune.errors import InputError
from silotune.evaluation import predict
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.engines.base import is_better
from silotune.runs.run import run
from tests.support.chats import chat_model, conversations, write_lines
from tests.support.method_cases import logged


@pytest.fixture
def chats(tmp_path, tmp_path_factory):
    """A configuration of one silo of conversations, and its backbone's folder."""
    backbone = chat_model(tmp_path_factory.getbasetemp())
    write_lines(tmp_path / "a.jsonl", conversations())
    text = f"""
method: fedit
backbone: {backbone}
tuner: {{name: lora, r: 2}}
head: {{name: lm, max_new_tokens: 4}}
rounds: 3
threads: 1
precision: fp32
train: {{lr: 1e-2, max_length: 96}}
silos: [{{name: a, path: {tmp_path / "a.jsonl"}}}]
"""
    (tmp_path / "chats.yaml").write_text(text, encoding="utf-8")
    return str(tmp_path / "chats.yaml"), backbone


def test_the_mean_loss_is_that_of_the_plain_model(chats):
    federation = build(read_config(chats[0]))
    (silo,) = federation.silos.values()
    rows = silo.evaluations["a"].validation
    state = federation.coordinator.shared | federation.context.state_of(silo).private
    measured = predict.mean_loss(federation.context, state, rows)  # LoRA starts at zero: the model is the plain one
    model, losses = AutoModelForCausalLM.from_pretrained(chats[1]).eval(), []
    for ids, reads, targets in zip(rows.ids, rows.reads, rows.targets, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, reads]
        losses += functional.cross_entropy(scores, torch.tensor(targets), reduction="none").tolist()
    assert measured == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert predict.measure(federation.context, state, rows, "perplexity").score == pytest.approx(
        float(torch.tensor(measured).exp()), rel=1e-6
    )


def test_no_answer_is_written_before_the_last_round_and_the_lowest_loss_is_best(chats, tmp_path, monkeypatch):
    written = []
    original = predict.answers
    monkeypatch.setattr(predict, "answers", lambda *arguments: written.append(1) or original(*arguments))
    finished = run(chats[0], "evaluation.baselines=false", out=tmp_path / "out")
    assert len(written) == 1  # the test rows at the end
    losses = [next(iter(event["validation"].values())) for event in logged(tmp_path / "out", "round")]
    entry = finished.silos["a"]
    assert finished.summary["best_round"] == losses.index(min(losses)) + 1
    assert entry["validation"] == min(losses)
    assert entry["validation_metric"] == "loss"
    assert entry["metric"] == "rouge1"


def test_the_default_follows_the_head(chats):
    assert read_config(chats[0]).validates_by_loss
    assert not read_config(chats[0], ["evaluation.validation=metric"]).validates_by_loss
    assert not read_config("demo").validates_by_loss
    assert read_config("demo", ["evaluation.validation=loss"]).validates_by_loss
    assert not read_config("feddpa-dataset1", ["data.path=."]).validates_by_loss  # as the paper reports it


def test_lower_is_better_for_losses_alone():
    assert is_better({"a": 1.0}, 1.0, {"a": 2.0}, 2.0, lower=True)
    assert not is_better({"a": 1.0}, 1.0, {"a": 2.0}, 2.0)
    assert is_better({"a": 5.0, "b": 1.0}, 3.0, {"b": 2.0}, 2.0, lower=True)  # judged by more silos
    assert not is_better({"b": 3.0}, 3.0, {"a": 9.0, "b": 2.0}, 5.5, lower=True)  # only silos judged in both count
    assert is_better({}, 2.0, {}, 1.0, lower=True)  # without scores the later round


def test_perplexity():
    assert LOSS_SCORES["perplexity"](0) == 1
    assert LOSS_SCORES["perplexity"](1e4) == float("inf")


def test_losses_and_other_metrics_are_not_mixed(chats):
    config = read_config(chats[0])
    rows = [Row(("a", ""), 0, "b"), Row(("c", ""), 0, "d")]
    data = [
        SiloData(name, make_task(name, name, "generation", metric=metric), Splits(rows, rows, rows))
        for name, metric in (("a", "loss"), ("b", "rougeL"))
    ]
    with pytest.raises(InputError, match="silo 'a' is judged by loss and silo 'b' by rougeL"):
        build(config, data=data)
