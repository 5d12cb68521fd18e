"""`conversation_rows` and `preference_rows` make rows of turns in OpenAI's or ShareGPT's shape, which are checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silotune.config.tables import source_name
from silotune.data.readers import Record, read_text, require_columns
from silotune.data.rows import ASSISTANT, Row, Turn
from silotune.data.text_checks import text_fault
from silotune.errors import InputError

MESSAGES, CONVERSATIONS = "messages", "conversations"

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"

_SHAPES = (("role", "content"), ("from", "value"))
"""The keys of a turn: OpenAI's, ShareGPT's."""

_ROLES = {"system": "system", "user": "user", "assistant": ASSISTANT, "human": "user", "gpt": ASSISTANT}
"""Roles as files name them, and as chat templates do."""


def conversation_rows(path: Path, records: Sequence[Record]) -> list[Row]:
    """Make rows of conversations, from the column `messages` or `conversations`.

    Everything up to the assistant's last turn is kept; that turn is the row's answer. A column `system` (ShareGPT) is
    the first turn.

    Args:
        path: the file, for messages.
        records: rows of the file.
    """
    column = MESSAGES if MESSAGES in records[0] else CONVERSATIONS
    rows = []
    for number, record in enumerate(records, start=1):
        where = f"{source_name(path)}: row {number}"
        turns = read_turns(record.get(column), f"{where}: {column!r}")
        if record.get("system") and turns[0][0] != "system":
            turns = [("system", read_text(path, number, record, "system")), *turns]
        before, answer = _with_answer(turns, f"{where}: {column!r}")
        rows.append(Row(_texts(before), 0, answer, turns=before))
    return rows


def preference_rows(path: Path, records: Sequence[Record]) -> list[Row]:
    """Make rows of preference pairs, from the columns `prompt`, `chosen` and `rejected`: texts, or lists of turns.

    Lists of turns end with the assistant's answer. They may begin with the turns of the prompt, and the column `prompt`
    may then be missing.

    Args:
        path: the file, for messages.
        records: rows of the file.
    """
    require_columns(path, records[0], [CHOSEN, REJECTED])
    rows = []
    for number, record in enumerate(records, start=1):
        where = f"{source_name(path)}: row {number}"
        if _is_turns(record.get(CHOSEN)) or _is_turns(record.get(REJECTED)):
            rows.append(_preference_of_turns(path, number, record))
            continue
        chosen, rejected = (read_text(path, number, record, column) for column in (CHOSEN, REJECTED))
        if _is_turns(record.get(PROMPT)):
            turns = tuple(read_turns(record[PROMPT], f"{where}: {PROMPT!r}"))
            row = Row(_texts(turns), 0, chosen, turns=turns, rejected=rejected)
        else:
            row = Row((read_text(path, number, record, PROMPT), ""), 0, chosen, rejected=rejected)
        rows.append(_distinct(row, where))
    return rows


def asked_row(turns: Any, where: str) -> Row:
    """Make the row of a conversation that the assistant is to continue; it has no answer."""
    checked = tuple(read_turns(turns, where))
    if checked[-1][0] != "user":
        raise InputError(f"{where}: the last turn has to be the user's (found {checked[-1][0]})")
    return Row(_texts(checked), 0, turns=checked)


def _preference_of_turns(path: Path, number: int, record: Record) -> Row:
    where = f"{source_name(path)}: row {number}"
    answers = []
    for column in (CHOSEN, REJECTED):
        turns = read_turns(record.get(column), f"{where}: {column!r}")
        if turns[-1][0] != ASSISTANT:
            raise InputError(f"{where}: {column!r} has to end with a turn of the assistant (found {turns[-1][0]})")
        answers.append((tuple(turns[:-1]), turns[-1][1]))
    (before, chosen), (other, rejected) = answers
    if before != other:
        raise InputError(f"{where}: {CHOSEN!r} and {REJECTED!r} answer different prompts")
    if _is_turns(record.get(PROMPT)):
        prompt = tuple(read_turns(record[PROMPT], f"{where}: {PROMPT!r}"))
        before = before if before[: len(prompt)] == prompt else (*prompt, *before)
    elif not before:
        before = (("user", read_text(path, number, record, PROMPT)),)
    return _distinct(Row(_texts(before), 0, chosen, turns=before, rejected=rejected), where)


def _distinct(row: Row, where: str) -> Row:
    if row.answer == row.rejected:
        raise InputError(f"{where}: {CHOSEN!r} and {REJECTED!r} are the same answer")
    return row


def read_turns(value: Any, where: str) -> list[Turn]:
    """Read a list of turns; a text is read as JSON first (CSV files).

    Args:
        value: the cell.
        where: file, row and column, for messages.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not value:
        raise InputError(f"{where} is no list of turns such as {{'role': 'user', 'content': …}}")
    turns = [_turn(turn, f"{where}: turn {number}") for number, turn in enumerate(value, start=1)]
    late = next((number for number, (role, _) in enumerate(turns, start=1) if role == "system" and number > 1), None)
    if late is not None:
        raise InputError(f"{where}: turn {late}: a system turn has to be the first")
    return turns


def _turn(turn: Any, where: str) -> Turn:
    shape = next((keys for keys in _SHAPES if isinstance(turn, Mapping) and {*keys} <= {*turn}), None)
    if shape is None:
        keys = ", ".join(map(str, turn)) if isinstance(turn, Mapping) else type(turn).__name__
        raise InputError(f"{where}: needs role and content, or from and value (found {keys})")
    role, content = (turn[key] for key in shape)
    if not isinstance(role, str) or role not in _ROLES:
        raise InputError(f"{where}: unknown role {role!r}; allowed: {', '.join(_ROLES)}")
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InputError(f"{where}: {shape[1]!r} is not text but {type(content).__name__}")
    if fault := text_fault(content):
        raise InputError(f"{where}: {shape[1]!r} {fault}")
    return _ROLES[role], content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_turns(value: Any) -> bool:
    return isinstance(value, list)


def _with_answer(turns: Sequence[Turn], where: str) -> tuple[tuple[Turn, ...], str]:
    """Split turns into those before the assistant's last one, and its content."""
    last = max((position for position, (role, _) in enumerate(turns) if role == ASSISTANT), default=None)
    if last is None:
        raise InputError(f"{where} has no turn of the assistant, so there is nothing to train on")
    if not any(role == "user" for role, _ in turns[:last]):
        raise InputError(f"{where} has no turn of the user before the assistant's last one")
    return tuple(turns[:last]), turns[last][1]


def _texts(before: Sequence[Turn]) -> tuple[str, str]:
    """Return the texts of a row: the content of the last turn, as its instruction."""
    return before[-1][1], ""
