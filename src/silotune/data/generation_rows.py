"""Read rows of generation tasks: instructions, prompts, conversations and preference pairs.

Conversations are lists of turns in the shape of OpenAI (`role`, `content`) or ShareGPT (`from`, `value`). Turns may
call tools (`tool_calls`), be a tool's answer, or hold thoughts (`reasoning_content`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from silotune.config.tables import source_name
from silotune.data.readers import Record, read_text, require_columns
from silotune.data.rows import ASSISTANT, Row, Turn, text_fault
from silotune.errors import InputError

INSTRUCTION, INPUT, OUTPUT, RESPONSE = "instruction", "input", "output", "response"

MESSAGES, CONVERSATIONS = "messages", "conversations"

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"

_SHAPES = (("role", "content"), ("from", "value"))
"""The keys of a turn: OpenAI's, ShareGPT's."""

TOOLS, TOOL_CALLS, REASONING = "tools", "tool_calls", "reasoning_content"

_KEYS: Mapping[str, tuple[str, ...]] = {ASSISTANT: (REASONING, TOOL_CALLS), "tool": ("name", "tool_call_id")}
"""Role → the further keys of its turns that chat templates read."""

_UNREAD = (TOOLS, "functions", "images", "audios", "videos", "documents", "history", "system")
"""Columns that change what a row means, and that no prompt has; a conversation's `system` is its first turn."""

_ROLES = {role: role for role in ("system", "user", ASSISTANT, "tool")}
_ROLES |= {"human": "user", "gpt": ASSISTANT, "observation": "tool"}
"""Roles as files name them, and as chat templates do."""

Format = Literal["conversations", "preferences", "instructions", "prompts"]

_COLUMNS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("instructions", (INSTRUCTION, OUTPUT)),
    ("conversations", (MESSAGES,)),
    ("conversations", (CONVERSATIONS,)),
    ("preferences", (CHOSEN, REJECTED)),
    ("prompts", (PROMPT, RESPONSE)),
)
"""The columns by which a format is known, in the order in which they are looked for."""


def find_format(record: Record) -> Format | None:
    """Return the format of generation data with these columns; None for labeled texts and unknown columns."""
    if "label" in record:
        return None
    return next((name for name, columns in _COLUMNS if {*columns} <= record.keys()), None)


def generation_rows(path: Path, records: Sequence[Record], format: Format) -> list[Row]:
    """Make the rows of a generation task in one of the known formats."""
    rows = _READERS[format](path, records)
    remarks = [_left_out(record, format) for record in records]
    return [replace(row, remarks=own) if own else row for row, own in zip(rows, remarks, strict=True)]


def _left_out(record: Record, format: Format) -> tuple[str, ...]:
    """Name the ignored columns of a row, such as `images`, and keys of its turns, such as `function_call`."""
    talk = format == "conversations"
    columns = [name for name in _UNREAD if record.get(name) and not (talk and name in ("system", TOOLS))]
    keys = {
        key
        for column in (MESSAGES, CONVERSATIONS, PROMPT, CHOSEN, REJECTED)
        for turn in _listed(record.get(column))
        for key, value in (turn.items() if isinstance(turn, Mapping) else ())
        if key not in ("role", "content", "from", "value", *_KEYS.get(str(turn.get("role")), ()))
        if value not in (None, "", [], {})
        if not (talk and key == "weight" and value in (0, 1))
    }
    return (
        *(f"the column {name!r} is left out" for name in columns),
        *(f"the key {key!r} of a turn is left out" for key in sorted(map(str, keys))),
    )


def instruction_rows(
    path: Path, records: Sequence[Record], text: Sequence[str] = (INSTRUCTION, INPUT), output: str = OUTPUT
) -> list[Row]:
    """Make the rows of a generation task."""
    instruction, *input_columns = text
    require_columns(path, records[0], [instruction, output])
    rows = []
    for number, record in enumerate(records, start=1):
        inputs = [
            read_text(path, number, record, column) for column in input_columns if record.get(column) not in (None, "")
        ]
        texts = (read_text(path, number, record, instruction), *(inputs or [""]))
        rows.append(Row(texts, 0, read_text(path, number, record, output)))
    return rows


def _conversation_rows(path: Path, records: Sequence[Record]) -> list[Row]:
    """Make rows of conversations, from the column `messages` or `conversations`.

    Everything up to the assistant's last turn is kept; that turn is the row's answer. Turns with `weight: 0` are no
    answers: one is only read if an answer follows. A column `system` (ShareGPT) is
    the first turn.
    """
    column = MESSAGES if MESSAGES in records[0] else CONVERSATIONS
    rows = []
    for number, record in enumerate(records, start=1):
        where = f"{source_name(path)}: row {number}"
        turns = read_turns(record.get(column), f"{where}: {column!r}")
        weights = [turn.get("weight") for turn in _listed(record.get(column))]
        if record.get("system") and turns[0][0] != "system":
            turns = [("system", read_text(path, number, record, "system")), *turns]
            weights = [None, *weights]
        before, (_, answer, *more) = _with_answer(turns, weights, f"{where}: {column!r}")
        untrained = tuple(n - len(before) - 1 for n in range(len(before)) if weights[n] == 0)
        extra = more[0] if more else ""
        if not answer:  # tools are called without a word
            answer, extra = extra, json.dumps(json.loads(extra) | {"content": ""}, ensure_ascii=False)
        tools = _read_tools(record.get(TOOLS), f"{where}: {TOOLS!r}")
        rows.append(Row((before[-1][1], ""), 0, answer, turns=before, untrained=untrained, said=extra, tools=tools))
    return rows


def _read_tools(value: Any, where: str) -> str:
    """Return a list of tools, or its JSON, as JSON; nothing for nothing."""
    if value in (None, "", [], "[]"):
        return ""
    tools = _listed(value)
    if not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(f"{where} is no list of tools such as {{'type': 'function', 'function': …}}")
    return json.dumps(tools, ensure_ascii=False)


def _preference_rows(path: Path, records: Sequence[Record]) -> list[Row]:
    """Make rows of preference pairs, from the columns `prompt`, `chosen` and `rejected`: texts, or lists of turns.

    Lists of turns end with the assistant's answer. They may begin with the turns of the prompt, and the column `prompt`
    may then be missing.
    """
    require_columns(path, records[0], [CHOSEN, REJECTED])
    rows = []
    for number, record in enumerate(records, start=1):
        where = f"{source_name(path)}: row {number}"
        if isinstance(record.get(CHOSEN), list) or isinstance(record.get(REJECTED), list):
            rows.append(_preference_of_turns(path, number, record))
            continue
        chosen, rejected = (read_text(path, number, record, column) for column in (CHOSEN, REJECTED))
        if isinstance(record.get(PROMPT), list):
            turns = tuple(read_turns(record[PROMPT], f"{where}: {PROMPT!r}"))
            row = Row((turns[-1][1], ""), 0, chosen, turns=turns, rejected=rejected)
        else:
            row = Row((read_text(path, number, record, PROMPT), ""), 0, chosen, rejected=rejected)
        rows.append(_distinct(row, where))
    return rows


def asked_row(turns: Any, where: str) -> Row:
    """Make the row of a conversation that the assistant is to continue; it has no answer."""
    tools = ""
    if isinstance(turns, Mapping):
        tools, turns = _read_tools(turns.get(TOOLS), f"{where}: {TOOLS!r}"), turns.get(MESSAGES)
    checked = tuple(read_turns(turns, where))
    if checked[-1][0] not in ("user", "tool"):
        raise InputError(f"{where}: the last turn has to be the user's, or a tool's answer (found {checked[-1][0]})")
    return Row((checked[-1][1], ""), 0, turns=checked, tools=tools)


def _preference_of_turns(path: Path, number: int, record: Record) -> Row:
    where = f"{source_name(path)}: row {number}"
    answers = []
    for column in (CHOSEN, REJECTED):
        turns = read_turns(record.get(column), f"{where}: {column!r}")
        if turns[-1][0] != ASSISTANT:
            raise InputError(f"{where}: {column!r} has to end with a turn of the assistant (found {turns[-1][0]})")
        if len(turns[-1]) > 2:
            raise InputError(f"{where}: {column!r} ends with more than a text ({turns[-1][2][:40]}); allowed: content")
        answers.append((tuple(turns[:-1]), turns[-1][1]))
    (before, chosen), (other, rejected) = answers
    if before != other:
        raise InputError(f"{where}: {CHOSEN!r} and {REJECTED!r} answer different prompts")
    if isinstance(record.get(PROMPT), list):
        prompt = tuple(read_turns(record[PROMPT], f"{where}: {PROMPT!r}"))
        before = before if before[: len(prompt)] == prompt else (*prompt, *before)
    elif not before:
        before = (("user", read_text(path, number, record, PROMPT)),)
    return _distinct(Row((before[-1][1], ""), 0, chosen, turns=before, rejected=rejected), where)


def _distinct(row: Row, where: str) -> Row:
    if row.answer == row.rejected:
        raise InputError(f"{where}: {CHOSEN!r} and {REJECTED!r} are the same answer")
    return row


def read_turns(value: Any, where: str) -> list[Turn]:
    """Read a list of turns; a text is read as JSON first (CSV files)."""
    value = _listed(value)
    if not value:
        raise InputError(f"{where} is no list of turns such as {{'role': 'user', 'content': …}}")
    turns = [_turn(turn, f"{where}: turn {number}") for number, turn in enumerate(value, start=1)]
    late = next((number for number, turn in enumerate(turns, start=1) if turn[0] == "system" and number > 1), None)
    if late is not None:
        raise InputError(f"{where}: turn {late}: a system turn has to be the first")
    return turns


def _listed(value: Any) -> list[Any]:
    """Return a list of turns, which a text holds as JSON; empty if it is none."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return value if isinstance(value, list) else []


def _turn(turn: Any, where: str) -> Turn:
    if isinstance(turn, Mapping) and turn.get(TOOL_CALLS) and turn.get("content") is None:
        turn = {**turn, "content": ""}
    shape = next((keys for keys in _SHAPES if isinstance(turn, Mapping) and {*keys} <= {*turn}), None)
    if shape is None:
        keys = ", ".join(map(str, turn)) if isinstance(turn, Mapping) else type(turn).__name__
        raise InputError(f"{where}: needs role and content, or from and value (found {keys})")
    role, content = (turn[key] for key in shape)
    if not isinstance(role, str) or role not in _ROLES:
        raise InputError(f"{where}: unknown role {role!r}; allowed: {', '.join(_ROLES)}")
    if isinstance(content, list) and content:
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str):
        raise InputError(f"{where}: {shape[1]!r} is not text but {type(content).__name__}")
    role = _ROLES[role]
    more = {key: turn[key] for key in _KEYS.get(role, ()) if turn.get(key)}
    if TOOL_CALLS in more:
        more[TOOL_CALLS] = [_call(call, f"{where}: {TOOL_CALLS!r}") for call in _listed(more[TOOL_CALLS]) or [None]]
    if not all(isinstance(value, str) for key, value in more.items() if key != TOOL_CALLS):
        raise InputError(f"{where}: {', '.join(more)}: not text")
    written = json.dumps(more, ensure_ascii=False) if more else ""
    may_be_empty = role == "tool" or TOOL_CALLS in more
    for key, text in ((shape[1], "-" if may_be_empty and not content.strip() else content), *more.items()):
        if fault := text_fault(text if key != TOOL_CALLS else written):
            raise InputError(f"{where}: {key!r} {fault}")
    return (role, content, written) if written else (role, content)


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool with its arguments as an object, which every template takes; OpenAI's are JSON."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise InputError(f"{where} is no list of calls such as {{'function': {{'name': …, 'arguments': …}}}}")
    arguments = inner.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: the arguments of {inner['name']!r} are no JSON") from error
    named = {**inner, "arguments": arguments}
    return {**call, "function": named} if "function" in call else named


def _with_answer(turns: Sequence[Turn], weights: Sequence[Any], where: str) -> tuple[tuple[Turn, ...], Turn]:
    """Split turns into those before the assistant's last one whose weight is not 0, and that one."""
    own = [position for position, turn in enumerate(turns) if turn[0] == ASSISTANT]
    last = max((position for position in own if weights[position] != 0), default=None)
    if last is None:
        what = "no turn of the assistant" if not own else "weight 0 in all turns of the assistant"
        raise InputError(f"{where} has {what}, so there is nothing to train on")
    if not any(turn[0] == "user" for turn in turns[:last]):
        raise InputError(f"{where} has no turn of the user before the assistant's last one")
    return tuple(turns[:last]), turns[last]


_READERS: Mapping[Format, Callable[[Path, Sequence[Record]], list[Row]]] = {
    "conversations": _conversation_rows,
    "preferences": _preference_rows,
    "instructions": instruction_rows,
    "prompts": partial(instruction_rows, text=(PROMPT,), output=RESPONSE),
}


def row_format(row: Row) -> str:
    """Return in words the format of a generation task's row, for people."""
    if row.rejected:
        return "preference pairs"
    return "conversations" if row.turns else "instructions"


def lists_options(row: Row) -> bool:
    """Whether the row's text lists its answer as an option, on a line `- answer`."""
    return row.answer.strip() in options_of(row)


def options_of(row: Row) -> list[str]:
    """Return the options that the row's text lists, each on a line `- option`."""
    lines = (line.strip() for text in row.texts for line in text.splitlines())
    return list(dict.fromkeys(line[2:] for line in lines if line.startswith("- ")))
