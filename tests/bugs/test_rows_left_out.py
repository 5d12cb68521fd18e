"""What of a row is not trained is counted before training, and turns of weight 0 are only read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silotune.data.chat_template import ChatTemplate
from silotune.data.generation_rows import Format, generation_rows
from silotune.data.generation_tokenizer import GenerationTokenizer
from silotune.data.row_checks import describe_rows, row_warnings, token_warnings
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.errors import InputError
from tests.support.chats import CHATML, MARKED, chat_tokenizer

TASK, FILE = Task("a", (), kind="generation"), Path("rows.jsonl")
ASKED = {"role": "user", "content": "the soup?"}


def said(text: str = "warm.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def silo(rows: list[Row]) -> SiloData:
    return SiloData("north", TASK, Splits(rows, [], rows[:1]))


def read(record: dict[str, Any], format: Format = "conversations") -> list[Row]:
    return generation_rows(FILE, [record, {k: v for k, v in record.items() if k != "weight"}], format)


@pytest.mark.parametrize(
    ("record", "format", "word"),
    [
        (
            {"messages": [ASKED, said(function_call={"name": "f"})]},
            "conversations",
            "the key 'function_call' of a turn",
        ),
        ({"messages": [ASKED, said(weight=0.5)]}, "conversations", "the key 'weight' of a turn"),
        ({"messages": json.dumps([ASKED, said(reasoning="why")])}, "conversations", "the key 'reasoning' of a turn"),
        ({"messages": [ASKED, said()], "images": ["a.png"]}, "conversations", "the column 'images'"),
        ({"chosen": [ASKED, said()], "rejected": [ASKED, said("no", weight=0)]}, "preferences", "the key 'weight'"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "instructions", "the column 'history'"),
        ({"instruction": "a", "output": "b", "system": "be kind"}, "instructions", "the column 'system'"),
    ],
)
def test_what_is_left_out_is_counted(record: dict[str, Any], format: Format, word: str) -> None:
    data = silo(read(record, format))
    (line,) = [line for line in row_warnings(data, describe_rows(data)) if "left out" in line]
    assert line.startswith(f"silo 'north': 3 rows: {word}")


def test_what_changes_nothing_has_no_warning() -> None:
    plain = {"messages": [ASKED, said(weight=1, tool_calls=None, name="")], "tools": None, "id": 7, "system": "be kind"}
    (row, _) = read(plain)
    assert row.remarks == ()
    assert row.turns[0] == ("system", "be kind")


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("room", [400, 80])
def test_turns_of_weight_0_are_read_and_not_trained(template: str, room: int, tmp_path: Path) -> None:
    turns = [ASKED, said("rude!", weight=0), ASKED, said("warm."), ASKED, said("cold.", weight=1), ASKED]
    (row, _) = read({"messages": [*turns, said("worse!", weight=0)], "system": "be kind"})
    assert row.answer == "cold."
    write_rows(tmp_path, silo([row]))
    assert read_rows(tmp_path, "north").splits.train == [row]
    tokenizer = chat_tokenizer(template)
    tokens = GenerationTokenizer(tokenizer, ChatTemplate(tokenizer), 400, room)(TASK, [row])
    assert tokens.targets is not None
    trained = tokenizer.decode(tokens.targets[0])
    assert trained == "warm.<|im_end|>cold.<|im_end|>"
    assert ("rude!" in tokenizer.decode(tokens.ids[0])) is (room == 400)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="row 1: 'messages' has weight 0 in all turns of the assistant"):
        read({"messages": [ASKED, said(weight=0), ASKED, said(weight=False)]})


def warned(rows: list[Row], template: str = CHATML) -> str:
    tokenizer = chat_tokenizer(template)
    tokenize = GenerationTokenizer(tokenizer, ChatTemplate(tokenizer), 400, 300)
    return "\n".join(token_warnings(silo(rows), tokenizer, tokenize))


@pytest.mark.parametrize("text", ["<|im_end|>", "</s>", "<|im_start|>", "<pad>"])
def test_control_tokens_in_texts_are_counted(text: str) -> None:
    asked = Row((f"the soup{text}", ""), 0, "warm.", turns=(("user", f"the soup{text}"),))
    answered = Row(("the soup", ""), 0, f"warm{text}.", turns=(("user", "the soup"),))
    plain = Row(("the soup < s >", ""), 0, "warm.", turns=(("user", "the soup < s >"),))
    assert f"silo 'north': 2 of 4 rows hold the text {text!r}" in warned([plain, asked, answered])
    assert warned([plain]) == ""


def test_a_second_begin_token() -> None:
    row = Row(("the soup", ""), 0, "warm.", turns=(("user", "the soup"),))
    assert "begin with two begin tokens, '<s>'" in warned([row], "{{ bos_token }}{{ bos_token }}" + CHATML)
    assert warned([row], "{{ bos_token }}" + CHATML) == ""


def test_turns_that_a_template_leaves_out() -> None:
    turns = (("system", "be kind"), ("user", "the soup?"))
    row = Row(("the soup?", ""), 0, "warm.", turns=turns)
    silent = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    assert "in 2 of 2 rows the chat template leaves out a turn" in warned([row], silent)
    assert warned([row]) == ""
