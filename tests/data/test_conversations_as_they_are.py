"""Tools, thoughts and default system texts are trained as templates shaped like those of real models write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silotune.data.chat_template import ChatTemplate
from silotune.data.generation_rows import asked_row, generation_rows
from silotune.data.generation_tokenizer import GenerationTokenizer
from silotune.data.row_checks import token_warnings
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.runs.build.shown_rows import show_rows
from tests.support.chats import CHATML, chat_tokenizer

TASK, FILE = Task("a", (), kind="generation"), Path("rows.jsonl")

SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nYou are SmolLM.<|im_end|>\n{% endif %}" + CHATML.removeprefix("{% for m in messages %}")
)
QWEN3 = """\
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments if call.arguments is string else call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA31 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}<|im_start|>system

Cutting Knowledge Date: December 2023
{{ system }}<|im_end|>
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>ipython

{{ m.content | tojson if m.content is iterable else m.content }}<|im_end|>
{%- elif 'tool_calls' in m %}<|im_start|>assistant

{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|im_end|>
{%- else %}<|im_start|>{{ m['role'] }}

{{ m['content'] | trim }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}<|im_start|>{{ role }}
{{ first if loop.first else '' }}{{ m['content'] | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>model
{% endif %}"""

ASKED = {"role": "user", "content": "the weather in Rome?"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"where": "Rome", "days": [1, 2]}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = {"role": "tool", "tool_call_id": "1", "content": '22 C, "clear"'}
SAID = {"role": "assistant", "content": "It is warm."}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
CALLED = '<tool_call>\n{"name": "look", "arguments": {"where": "Rome", "days": [1, 2]}}\n</tool_call>'


def read(turns: list[Any], **columns: Any) -> Row:
    (row,) = generation_rows(FILE, [{"messages": turns, **columns}], "conversations")
    assert row.remarks == ()
    return row


def tokenizing(template: str, last_only: bool = False, room: int = 700) -> tuple[Any, GenerationTokenizer]:
    tokenizer = chat_tokenizer(template)
    return tokenizer, GenerationTokenizer(tokenizer, ChatTemplate(tokenizer), 900, room, last_only=last_only)


def shown(template: str, row: Row, last_only: bool = False) -> tuple[str, list[str], list[str]]:
    """Return a row as `silotune data --show` has it: all text, what is trained in pieces, and the warnings."""
    tokenizer, tokenize = tokenizing(template, last_only)
    silo = SiloData("north", TASK, Splits([row], [], [row]))
    (result,) = show_rows(tokenizer, tokenize, silo, 1)
    pieces, before = [], False
    for token in result.tokens:
        if token.trained:
            pieces = [*pieces[:-1], pieces[-1] + token.text] if before else [*pieces, token.text]
        before = token.trained
    warnings = [line for line in token_warnings(silo, tokenizer, tokenize) if "leaves out" in line]
    return "".join(token.text for token in result.tokens), pieces, warnings


@pytest.mark.parametrize(
    ("template", "last_only", "trained"),
    [
        (QWEN3, True, ["<think>\n\n</think>\n\nIt is warm.<|im_end|>"]),
        (
            LLAMA31,
            False,
            ['{"name": "look", "parameters": {"where": "Rome", "days": [1, 2]}}<|im_end|>', "It is warm.<|im_end|>"],
        ),
    ],
)
def test_a_call_of_a_tool_and_its_answer(template: str, last_only: bool, trained: list[str]) -> None:
    row = read([ASKED, CALLS, FOUND, SAID])
    text, pieces, warnings = shown(template, row, last_only)
    assert pieces == trained
    assert warnings == []
    assert "22 C" in text
    assert "None" not in text
    if template is QWEN3:
        assert CALLED in text
        with pytest.raises(InputError, match=r"turn 2 of a conversation differently.*head\.train_on=last"):
            shown(template, row)


def test_a_call_may_be_the_answer_and_tools_stand_in_the_prompt() -> None:
    for calls in (CALLS, {"role": "assistant", "tool_calls": [CALL["function"]]}, CALLS | {"content": ""}):
        row = read([ASKED, calls], tools=json.dumps(TOOLS))
        text, (trained,), warnings = shown(QWEN3, row)
        assert trained.removeprefix("<think>\n\n</think>\n\n").strip() == f"{CALLED}<|im_end|>"
        assert warnings == []
        assert '"description": "Looks."' in text
        _, tokenize = tokenizing(QWEN3)
        rows = tokenize(TASK, [row])
        assert rows.answers is not None
        assert CALLED in rows.answers[0]
        assert "<|im_end|>" not in rows.answers[0]
        asked = tokenize(TASK, [asked_row({"messages": [ASKED], "tools": TOOLS}, "predict")])
        assert asked.ids[0][:-1] == rows.ids[0][: rows.prompts[0]]
    _, _, warnings = shown(LLAMA31, row)
    assert "leaves out a turn, a tool or a part of it" in warnings[0]
    assert "'tools'" in warnings[0]  # the column's name
    with pytest.raises(InputError, match="leaves out the answer in turn 2"):
        shown(CHATML, row)


def test_a_dropped_call_in_the_prompt_is_counted() -> None:
    assert (
        "in 2 of 2 rows the chat template leaves out" in shown(SMOLLM2, read([ASKED, CALLS, FOUND, SAID]), True)[2][0]
    )


def test_words_beside_a_call_that_the_template_drops_are_refused() -> None:
    with pytest.raises(InputError, match="leaves out the answer in turn 2"):
        shown(LLAMA31, read([ASKED, CALLS | {"content": "I look."}]))
    assert "I look.<tool_call>" in shown(QWEN3, read([ASKED, CALLS | {"content": "I look."}]))[1][0]


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "<think>\nIt is May.\n</think>\n\nIt is warm."},
        {"role": "assistant", "content": "It is warm.", "reasoning_content": "It is May."},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "warm."}],
         "reasoning_content": "It is May."},
    ],
)  # fmt: skip
def test_thoughts_of_the_last_turn_are_trained_and_earlier_ones_dropped(answer: dict[str, Any]) -> None:
    thought = "<think>\nIt is May.\n</think>\n\nIt is warm.<|im_end|>"
    assert shown(QWEN3, read([ASKED, answer])) == (
        "<|im_start|>user\nthe weather in Rome?<|im_end|>\n<|im_start|>assistant\n" + thought, [thought], [],
    )  # fmt: skip
    row = read([ASKED, answer, ASKED, answer])
    text, pieces, warnings = shown(QWEN3, row, last_only=True)
    assert pieces == [thought]
    assert text.count("It is May.") == 1
    assert "in 2 of 2 rows the chat template leaves out a turn" in warnings[0]
    with pytest.raises(InputError, match=r"turn 2 of a conversation differently.*head\.train_on=last"):
        shown(QWEN3, row)
    if "reasoning_content" in answer:
        with pytest.raises(InputError, match="leaves out the answer in turn 2"):
            shown(CHATML, read([ASKED, answer]))


@pytest.mark.parametrize(("template", "default"), [(SMOLLM2, "You are SmolLM."), (LLAMA31, "Cutting Knowledge Date")])
def test_a_default_system_text_is_read_and_not_trained(template: str, default: str) -> None:
    text, pieces, warnings = shown(template, read([ASKED, SAID]))
    assert default in text
    assert pieces == ["It is warm.<|im_end|>"]
    assert warnings == []
    own = shown(template, read([{"role": "system", "content": "Be kind."}, ASKED, SAID]))[0]
    assert "Be kind." in own
    assert (default in own) is (template is LLAMA31)


def test_a_template_that_strips_and_merges() -> None:
    padded = {"role": "assistant", "content": "  It is warm. \n"}
    row = read([{"role": "system", "content": "Be kind."}, ASKED, padded, ASKED, padded])
    text, pieces, warnings = shown(GEMMA, row)
    assert "<|im_start|>user\nBe kind.\n\nthe weather in Rome?<|im_end|>" in text
    assert pieces == ["It is warm.<|im_end|>"] * 2
    assert warnings == []
    with pytest.raises(InputError, match=r"refuses turns of user, assistant, tool \(roles must alternate"):
        shown(GEMMA, read([ASKED, SAID, FOUND, SAID]))


def test_long_conversations_keep_calls_with_their_answers(tmp_path: Path) -> None:
    row = read([ASKED, CALLS, FOUND, SAID, ASKED, CALLS, FOUND, SAID], tools=TOOLS)
    tokenizer, tokenize = tokenizing(QWEN3, last_only=True)
    whole = tokenizer.decode(tokenize(TASK, [row]).ids[0])
    tokenizer, tokenize = tokenizing(QWEN3, last_only=True, room=tokenize(TASK, [row]).prompts[0] - 1)
    cut = tokenizer.decode(tokenize(TASK, [row]).ids[0])
    assert (whole.count(CALLED), cut.count(CALLED)) == (2, 1)
    assert (whole.count("<tool_response>"), cut.count("<tool_response>")) == (2, 1)
    write_rows(tmp_path, SiloData("north", TASK, Splits([row], [], [row])))
    assert read_rows(tmp_path, "north").splits.train == [row]


@pytest.mark.parametrize(
    ("turns", "columns", "words"),
    [
        ([ASKED, CALLS | {"tool_calls": "look"}], {}, "turn 2: 'tool_calls' is no list of calls"),
        ([ASKED, CALLS | {"tool_calls": [{"id": "1"}]}], {}, "turn 2: 'tool_calls' is no list of calls"),
        ([ASKED, CALLS | {"tool_calls": [{"name": "f", "arguments": "{"}]}], {}, "arguments of 'f' are no JSON"),
        ([ASKED, {"role": "assistant", "content": None}], {}, "turn 2: 'content' is not text"),
        ([ASKED, SAID | {"reasoning_content": ["a"]}], {}, "reasoning_content: not text"),
        ([ASKED, SAID], {"tools": "look"}, "'tools' is no list of tools"),
    ],
)
def test_what_cannot_be_read_is_named(turns: list[Any], columns: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as refused:
        read(turns, **columns)
    assert words in str(refused.value)


def test_preferences_between_calls_are_refused() -> None:
    with pytest.raises(InputError, match="'chosen' ends with more than a text"):
        generation_rows(FILE, [{"chosen": [ASKED, CALLS], "rejected": [ASKED, SAID]}], "preferences")
