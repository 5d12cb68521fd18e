"""A federation of conversations from raw JSON lines: shown token by token, trained, predicted and exported."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.support.chats import chat_model, conversations, sharegpt, write_lines


@pytest.fixture
def chats(tmp_path, tmp_path_factory, monkeypatch):
    """A folder with `chats.yaml`: a silo of `messages` and one of `conversations`."""
    write_lines(tmp_path / "north.jsonl", conversations())
    write_lines(tmp_path / "south.jsonl", [sharegpt(record) for record in conversations()])
    keys = {
        "method": "fedit",
        "backbone": str(chat_model(tmp_path_factory.getbasetemp())),
        "tuner": {"name": "lora", "r": 2},
        "head": {"name": "lm", "max_new_tokens": 4},
        "rounds": 1,
        "threads": 1,
        "precision": "fp32",
        "train": {"lr": 1e-2, "batch_size": 8, "max_length": 96},
        "silos": [{"name": name, "path": f"{name}.jsonl"} for name in ("north", "south")],
    }
    (tmp_path / "chats.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_trained_is_shown_token_by_token(chats, silotune):
    outcome = silotune("data", "chats.yaml", "--show", 6, "--silo", "south", "--json")
    assert outcome.code == 0, outcome.err
    (silo,) = json.loads(outcome.out)["silos"].values()
    assert silo["format"] == "conversations"
    assert silo["rows"] == {"train": 12, "validation": 4, "test": 4}
    for row in silo["shown"]:
        text = "".join(token["text"] for token in row["tokens"] if token["trained"])
        answers = [turn.removeprefix("assistant: ") for turn in row["texts"] if turn.startswith("assistant: ")]
        assert text == "".join(f"{answer}<|im_end|>" for answer in [*answers, row["target"]])
    printed = silotune("data", "chats.yaml", "--show", 1, "--silo", "north").out
    assert "'<|im_end|>'" in printed
    assert "of them trained" in printed
    assert "conversations" in printed
    plain = silotune("data", "demo", "--show", 1, "--json")
    first = next(iter(json.loads(plain.out)["silos"].values()))
    assert first["format"] == "texts with labels"
    assert first["shown"][0]["tokens"][0]["text"] == "[CLS]"
    assert first["shown"][0]["target"] in first["labels"]


@pytest.mark.long
def test_run_predict_and_export(chats, silotune):
    outcome = silotune("run", "chats.yaml", "--out", "out")
    assert outcome.code == 0, outcome.err
    summary = json.loads((chats / "out" / "summary.json").read_text())
    assert summary["template"] == "chat"
    assert {*summary["silos"]} == {"north", "south"}
    losses = [json.loads(line) for line in (chats / "out" / "events.jsonl").read_text().splitlines()]
    assert all(event["loss"] > 0 for event in losses if event["event"] == "silo")
    turns = [{"role": "user", "content": "the soup?"}]
    (chats / "asked.jsonl").write_text(json.dumps({"messages": turns}) + "\n" + "the soup?\n", encoding="utf-8")
    predicted = silotune("predict", "out", "--silo", "north", "--file", "asked.jsonl")
    first, second = map(json.loads, predicted.out.splitlines())
    assert first["text"] == turns
    assert first["answer"] == second["answer"]
    exported = silotune("export", "out", "--silo", "north", "--part", "global", "--to", "lora")
    assert exported.code == 0, exported.err
    assert json.loads((chats / "lora" / "head.json").read_text())["options"]["template"] == "chat"
    again = silotune("run", "chats.yaml", "--out", "out", "--resume")
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["head.template=Do {instruction}"], "the rows of task 'north' are conversations; allowed: chat"),
        (["head.chat_template=rag"], "'rag'"),
        (["head.template=Do {instruction}", "head.chat_kwargs.a=true"], "head.chat_kwargs: of head.template=chat"),
        (["head.name=mlp", "head.train_on=last"], "train_on belongs to head=lm"),
    ],
)
def test_what_does_not_fit_is_one_line(chats, silotune, words, said):
    silotune("data", "chats.yaml", *words, "--show", 1).refusal(said)
