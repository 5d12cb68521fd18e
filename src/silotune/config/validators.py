"""Types and validators that several sections share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from unicodedata import normalize

from pydantic import AfterValidator, BeforeValidator

NAME_RULE = "letters a to z and A to Z, digits, spaces, '.', '_' and '-', beginning with a letter or digit"


def distinct(names: list[Any]) -> list[Any]:
    """Return the names if each appears once."""
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ValueError(f"{name!r} appears twice")
    return names


def listed(value: object) -> object:
    """Split a string at commas; return any other value unchanged."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def is_name(name: str) -> bool:
    """Return whether this can be the name of a silo or task."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]*", name) is not None


def is_address(text: str) -> bool:
    """Return whether this is HOST:PORT: without spaces, `https://` or a path."""
    return re.fullmatch(r"[^\s/@?#]+:([1-9][0-9]{0,4})", text) is not None and int(text.rpartition(":")[2]) <= 65535


def fitting(fits: Callable[[str], object], fault: str) -> AfterValidator:
    """Return the validator of a key whose text must fit; the fault follows the text in the message."""

    def check(text: str) -> str:
        if not fits(text):
            raise ValueError(f"{text!r} {fault}")
        return text

    return AfterValidator(check)


Address = Annotated[str, fitting(is_address, "is not HOST:PORT, as in example.org:443")]

Name = Annotated[str, fitting(is_name, f"cannot be a name; allowed: {NAME_RULE}")]
"""The name of a silo or task: it becomes part of paths in the run folder."""

Words = Annotated[list[str], BeforeValidator(listed), AfterValidator(distinct)]
"""Different words: a list, or text with commas between."""

Names = Annotated[list[Name], BeforeValidator(listed), AfterValidator(distinct)]
"""Different names of silos or tasks: a list, or text with commas between."""


@dataclass(frozen=True)
class PathKind:
    """Marks text as a path, which `config.paths.absolute` resolves against the folder of its file."""

    always: bool = True  # also where no such file exists; otherwise it may be another name
    names: tuple[str, ...] = ()  # texts that are never a path


ConfigPath = Annotated[str, PathKind()]

BackboneName = Annotated[str, PathKind(always=False, names=("default", "smollm2", "mpnet"))]
"""A model that comes as a package, a folder or file if there is one of this name, else an id of the hub."""

GROUP_OF_KEYS = "keys of a configuration"

KeyGroup = Annotated[dict[str, Any], GROUP_OF_KEYS]
"""A group of keys of `Config`, whose paths are resolved as if it were a configuration of its own."""


_is_device = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d{0,2}))?|mps").fullmatch

Device = Annotated[str, fitting(_is_device, "is no device; allowed: auto, cpu, cuda, cuda:N (N from 0), mps")]
"""A value of the key `device`; whether this machine has it is known when the backbone is loaded."""


def number_or_auto(of: str, most: int | None = None, *, or_none: bool = False) -> BeforeValidator:
    """Return the validator of a key that takes a number from 1, or `auto`; the message says of what."""
    allowed = "at least 1" if most is None else f"1 to {most}"

    def check(value: object) -> object:
        if value == "auto" or (value is None and or_none):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= (most or value):
            return value
        raise ValueError(f"must be a number of {of} ({allowed}), or auto (got {value!r})")

    return BeforeValidator(check)


RowsAtOnce = Annotated[int | Literal["auto"], number_or_auto("rows", 2**16)]
"""Rows of one batch without gradient; `auto` chooses the number by the device's memory."""


def quoted(values: Iterable[object], what: str) -> None:
    """Refuse truth values, which YAML reads from a bare yes or no."""
    if any(isinstance(value, bool) for value in values):
        raise ValueError(f"YAML reads a bare yes, no, true, false, on or off as a truth value; put {what} in quotes")


def label_names(labels: object) -> object:
    """Turn whole numbers among the labels into names."""
    if not isinstance(labels, list):
        return labels
    return [label_name(label) for label in labels]


def label_name(label: object) -> object:
    """Turn a whole number into a label's name, and compose the characters of text."""
    quoted([label], "the label")
    return str(label) if isinstance(label, int) else composed(label)


def composed(value: object) -> object:
    """Return text in Unicode's form NFC, as rows have it; also the texts of a list or of a dictionary."""
    if isinstance(value, dict):
        return {composed(key): composed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [composed(part) for part in value]
    return normalize("NFC", value) if isinstance(value, str) else value


Labels = Annotated[list[str], BeforeValidator(label_names), AfterValidator(distinct)]
"""Different label names; whole numbers become text."""
