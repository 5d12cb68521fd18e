"""`silotune chat`: a conversation with a finished model, typed or through a pipe."""

from __future__ import annotations

import io

import pytest

from silotune.cli.chat import converse
from silotune.runs.personal_model import PersonalModel, load_model
from silotune.runs.run import run
from tests.support.chats import chat_model, conversations, write_lines
from tests.support.language_models import folder_of


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two finished runs of conversations: `chat` on a model with a template, `plain` on one without."""
    folder = tmp_path_factory.mktemp("chat")
    write_lines(folder / "north.jsonl", conversations())
    said = [{"instruction": f"say {n}", "output": "warm"} for n in range(20)]
    write_lines(folder / "say.jsonl", said)
    words = ("method=local", "tuner=lora", "rounds=1", "head=lm", "head.max_new_tokens=6", "precision=fp32")
    for name, backbone, rows in (
        ("chat", chat_model(folder), "north.jsonl"),
        ("plain", folder_of("llama", folder), "say.jsonl"),
    ):
        silos = [{"name": "north", "path": str(folder / rows)}]
        train = {"steps": 1, "batch_size": 4, "max_length": 96}
        run("", *words, backbone=str(backbone), silos=silos, train=train, out=folder / name)
    return folder


def test_what_was_said_is_remembered_until_it_is_forgotten(place):
    model = load_model(place / "chat", "north")
    answers = list(converse(model, ["one", "", "two", "/new", "one", "/quit", "never"]))
    first, second, again = answers
    assert first == again == model.write(["one"])[0]
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    assert second == model.write([turns])[0]
    kind = {"role": "system", "content": "Be kind."}
    assert list(converse(model, ["one"], "Be kind.")) == model.write([[kind, turns[0]]])


def test_an_answer_is_shown_as_it_is_written(place):
    model, pieces = load_model(place / "chat", "north"), []
    (answer,) = converse(model, ["tell me"], follow=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == answer


@pytest.mark.parametrize("where", [("chat", "--silo", "north"), ("chat/models/north",), ("plain", "--silo", "north")])
def test_a_pipe_gets_a_line_for_each_line(where, place, silotune, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    outcome = silotune("chat", *where)
    assert outcome.code == 0, outcome.err
    model = PersonalModel.open(place / where[0].split("/")[0] / "models" / "north")
    expected = [" ".join(answer.split()) for answer in converse(model, ["one", "two"])]
    assert outcome.out.split("\n") == [*expected, ""]


def test_questions_are_typed_until_the_input_ends(place, silotune, monkeypatch):
    monkeypatch.chdir(place)
    typed = iter(["one"])

    def give(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", give)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    outcome = silotune("chat", "plain", "--silo", "north")
    assert outcome.code == 0, outcome.err
    assert "every question stands alone" in outcome.out
    assert load_model(place / "plain", "north").write(["one"])[0] in outcome.out


@pytest.mark.parametrize(
    ("words", "said"),
    [(("plain",), "--silo: is missing"), (("plain", "--silo", "north", "--system", "Be kind."), "chat template")],
)
def test_what_cannot_be_is_refused(words, said, place, silotune, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    outcome = silotune("chat", *words)
    assert outcome.code == 2
    assert said in outcome.err
