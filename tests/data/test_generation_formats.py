"""Formats of generation data are found from the columns, in every kind of file; malformed rows are named."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from silotune.config import SiloConfig
from silotune.data.generation_rows import asked_row, find_format, generation_rows, row_format
from silotune.data.own_silos import own_sets
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.errors import InputError
from tests.support.chats import conversations, sharegpt, write_lines

FILE = Path("rows.jsonl")
USER, ANSWER = {"role": "user", "content": "the soup?"}, {"role": "assistant", "content": "warm"}


def conversation_rows(records):
    return generation_rows(FILE, records, "conversations")


def preference_rows(*records):
    return generation_rows(FILE, records, "preferences")


def test_both_shapes_make_the_same_rows():
    records = conversations(6)
    rows = conversation_rows(records)
    assert rows == conversation_rows([sharegpt(record) for record in records])
    assert rows[1].turns == (("user", "the soup 1?"), ("assistant", "It was warm."), ("user", "and now"))
    assert rows[1].answer == "cold 1."
    assert rows[1].texts == ("and now", "")
    assert rows[0].turns[0] == ("system", "Be kind.")


def test_what_follows_the_last_answer_is_left_out_and_a_system_column_is_the_first_turn():
    (row,) = conversation_rows(
        [{"system": "Be kind.", "conversations": sharegpt({"messages": [USER, ANSWER, USER]})["conversations"]}]
    )
    assert row.turns == (("system", "Be kind."), ("user", "the soup?"))
    assert row.answer == "warm"


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        (("messages",), "conversations"),
        (("conversations", "id"), "conversations"),
        (("prompt", "chosen", "rejected"), "preferences"),
        (("prompt", "response"), "prompts"),
        (("instruction", "output", "messages"), "instructions"),
        (("messages", "label"), None),
        (("text", "prompt"), None),
    ],
)
def test_the_columns_show_the_format(columns, format):
    assert find_format(dict.fromkeys(columns, "")) == format


def test_prompts_are_instructions_without_input():
    assert generation_rows(FILE, [{"prompt": "a", "response": "b"}], "prompts") == [Row(("a", ""), 0, "b")]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "row 1: 'messages' is no list of turns"),
        ([], "row 1: 'messages' is no list of turns"),
        ("not json", "row 1: 'messages' is no list of turns"),
        ([USER], "row 1: 'messages' has no turn of the assistant"),
        ([ANSWER], "row 1: 'messages' has no turn of the user before"),
        ([{"role": "bot", "content": "x"}], "turn 1: unknown role 'bot'; allowed: system, user, assistant"),
        ([USER, {"speaker": "x"}], "turn 2: needs role and content, or from and value (found speaker)"),
        ([USER, {"role": "assistant", "content": " "}], "turn 2: 'content' is empty"),
        ([USER, {"role": "assistant", "content": 7}], "turn 2: 'content' is not text but int"),
        ([USER, {"role": "system", "content": "x"}, ANSWER], "turn 2: a system turn has to be the first"),
    ],
)
def test_malformed_conversations_are_named(messages, said):
    with pytest.raises(InputError) as error:
        conversation_rows([{"messages": messages}])
    assert said in str(error.value)


def test_preferences_of_texts_and_of_turns():
    expected = Row(("the soup?", ""), 0, "warm", turns=(("user", "the soup?"),), rejected="cold")
    bad = {"role": "assistant", "content": "cold"}
    assert preference_rows({"prompt": "a", "chosen": "b", "rejected": "c"}) == [Row(("a", ""), 0, "b", rejected="c")]
    for record in (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [bad]},
        {"prompt": "the soup?", "chosen": [USER, ANSWER], "rejected": [USER, bad]},
        {"prompt": "the soup?", "chosen": [ANSWER], "rejected": [bad]},
        {"chosen": [USER, ANSWER], "rejected": [USER, bad]},
        {"prompt": [USER], "chosen": "warm", "rejected": "cold"},
    ):
        assert preference_rows(record) == [expected]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"chosen": "a", "rejected": "b"}, "'prompt' is missing"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "the same answer"),
        ({"prompt": "p", "chosen": [USER], "rejected": [ANSWER]}, "'chosen' has to end with a turn of the assistant"),
        ({"chosen": [USER, ANSWER], "rejected": [ANSWER]}, "answer different prompts"),
    ],
)
def test_malformed_preferences_are_named(record, said):
    with pytest.raises(InputError) as error:
        preference_rows(record)
    assert said in str(error.value)


def test_a_conversation_to_continue_ends_with_the_user():
    assert asked_row([USER], "predict").turns == (("user", "the soup?"),)
    with pytest.raises(InputError, match="last turn has to be the user's"):
        asked_row([USER, ANSWER], "predict")


def own(path: Path, **keys):
    (labeled_set,) = own_sets([SiloConfig(name="a", path=str(path), **keys)], None).values()
    return labeled_set


def test_every_kind_of_file(tmp_path):
    records = conversations(4)
    expected = conversation_rows(records)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", records)
    cells = ('"' + json.dumps(record["messages"]).replace('"', '""') + '"' for record in records)
    (tmp_path / "a.csv").write_text("\n".join(["messages", *cells]), encoding="utf-8")
    for kind in ("parquet", "jsonl", "csv"):
        found = own(tmp_path / f"a.{kind}")
        assert found.task == Task("a", (), "rouge1", "generation")
        assert found.splits.train == expected


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    records = conversations(4)
    made = datasets.DatasetDict(train=datasets.Dataset.from_list(records), test=datasets.Dataset.from_list(records[:1]))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *words: asked.append(words) or made)
    found = own("hub:owner/name:small")
    assert asked == [("owner/name", "small")]
    assert found.splits.train == conversation_rows(records)
    assert len(found.splits.test) == 1


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def unreachable(*words):
        raise OSError("gone")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", unreachable)
    with pytest.raises(InputError, match=r"cannot load hub:owner/other \(gone\)"):
        own("hub:owner/other")


def test_conversations_and_preferences_survive_a_silos_folder(tmp_path):
    rows = [*conversation_rows(conversations(3)), *preference_rows({"prompt": "p", "chosen": "a", "rejected": "b"})]
    silo = SiloData("a", Task("t", (), "rouge1", "generation"), Splits(rows, [], rows[:1]))
    write_rows(tmp_path / "rows", silo)
    assert read_rows(tmp_path / "rows", "a") == silo
    assert [row_format(row) for row in rows] == ["conversations"] * 3 + ["preference pairs"]
