"""What a sweep searches: keys with several values or a range, for every method or for one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from silotune.config.merging import NAMED, SECTIONS, parse_word
from silotune.config.schema import Config
from silotune.errors import InputError, unknown
from silotune.methods import METHODS
from silotune.models.tuners import TUNERS

_BEGINS_LIKE_A_RANGE = re.compile(r"[-+]?\.?\d[^/]*\.\.")  # ../folder does not

_RANGE = re.compile(r"\s*(?P<low>[^\s:]+?)\.\.(?P<high>[^\s:]+?)(?P<log>:log)?\s*")

_NOT_SEARCHED = ("seed", "data", "partition", "silos", "backbone", "attack", "compare", "per_method", "method.name")
"""Keys whose values cannot be ranked by a validation score: other rows, other draws, another model or method."""

_DIGITS = 4  # of a number drawn from a range


@dataclass(frozen=True)
class Choices:
    """A key and the values it may take, in the order given."""

    key: str
    values: tuple[Any, ...]
    method: str | None = None
    """The one method that it is for; None: every one that has the key."""


@dataclass(frozen=True)
class Range:
    """A key and a range, both ends included; of whole numbers where both ends are. `log`: even over orders."""

    key: str
    low: float
    high: float
    log: bool
    method: str | None = None

    @property
    def is_integer(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def rounded(self, value: float) -> float:
        """A drawn value to a few digits, so that what was tried can be written down."""
        return value if self.is_integer else min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


Dimension = Choices | Range


def split_search(words: Iterable[str]) -> tuple[list[Dimension], list[str]]:
    """The words that are searched, and the others as they are.

    `key=a,b,c` are values, `key=low..high` (or `low..high:log`) is a range. `per_method.moon.method.mu=…` is searched
    for that method alone. A value in brackets, or of a key that takes a list, is one value.

    Raises:
        InputError: a range that is none, or a key by which models cannot be ranked.
    """
    found: list[Dimension] = []
    rest = []
    for word in words:
        key, equals, text = (piece.strip() for piece in word.partition("="))
        dimension = _dimension(key, text) if equals and not text.startswith(("[", "{", '"', "'")) else None
        if dimension is None:
            rest.append(word)
            continue
        if any(dimension.key == name or dimension.key.startswith(f"{name}.") for name in _NOT_SEARCHED):
            raise InputError(
                f"{key}: cannot be searched (scores would not be comparable); give one value, quoted if it has commas"
            )
        if any((other.key, other.method) == (dimension.key, dimension.method) for other in found):
            raise InputError(f"{key}: appears twice")
        found.append(dimension)
    return found, rest


def _dimension(key: str, text: str) -> Dimension | None:
    method, plain = None, key
    if key.startswith("per_method."):
        _, method, plain = ([*key.split(".", 2), ""])[:3]
        method = METHODS.canonical(method)
        if method not in METHODS:
            raise unknown("key", f"per_method.{method}", [f"per_method.{name}" for name in METHODS])
    if _takes_list(plain):
        return None
    if _BEGINS_LIKE_A_RANGE.match(text):
        return _range(plain, text, method)
    if "," not in text:
        return None
    values = [_number(parse_word(f"{key}={word}")[1]) for word in text.split(",")]
    if any(value is None for value in values):
        raise InputError(f"{key}: must be values with commas between (got {text!r})")
    for position, value in enumerate(values):
        if value in values[:position]:
            raise InputError(f"{key}: {value!r} appears twice")
    return Choices(plain, tuple(values), method)


def _range(key: str, text: str, method: str | None) -> Range:
    match = _RANGE.fullmatch(text)
    ends = [match["low"], match["high"]] if match else ["", ""]
    low, high = (_number(parse_word(f"{key}={end}")[1]) for end in ends)
    proper = [isinstance(end, (int, float)) and not isinstance(end, bool) and math.isfinite(end) for end in (low, high)]
    if match is None or not all(proper):
        raise InputError(f"{key}: a range is low..high, or low..high:log (got {text!r})")
    assert isinstance(low, (int, float))
    assert isinstance(high, (int, float))
    if low >= high or (match["log"] and low <= 0):
        needs = "above 0 and below" if match["log"] else "below"
        raise InputError(f"{key}: the low end must be {needs} the high one (got {text!r})")
    return Range(key, low, high, bool(match["log"]), method)


def _number(value: Any) -> Any:
    """YAML takes 1e-3 for a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _takes_list(key: str) -> bool:
    """Whether the configuration's key takes a list itself: of any tuner or method, where it is an option of those."""
    section, _, last = key.rpartition(".")
    if key in NAMED:  # x=a is short for x.name=a
        section, last = key, "name"
    options: dict[str, list[type[BaseModel]]] = {
        "": [Config],
        "tuner": [tuner.Options for tuner in TUNERS.values()],
        "method": [method.Options for method in METHODS.values()],
    }
    models = [*options.get(section, ()), *([SECTIONS[section]] if section in SECTIONS else ())]
    fields = [model.model_fields[last] for model in models if last in model.model_fields]
    kinds = [kind for field in fields for kind in (field.annotation, *get_args(field.annotation))]
    return any(get_origin(kind) in (list, tuple) for kind in kinds)


def space_for_method(method: str, dimensions: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """What is searched for one method: options that it does not have are left out, its own stand for the common."""
    options = METHODS[method].Options.model_fields
    own = {d.key for d in dimensions if d.method == method}
    found = []
    for dimension in dimensions:
        name = dimension.key.removeprefix("method.")
        if dimension.method == method or (
            dimension.method is None and dimension.key not in own and (name == dimension.key or name in options)
        ):
            found.append(dimension)
    return tuple(found)


def all_combinations(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Every combination; the last key changes fastest.

    Raises:
        InputError: for a range, which has no end of values.
    """
    for dimension in space:
        if isinstance(dimension, Range):
            raise InputError(f"{dimension.key}: a range needs a number of trials (--trials N)")
    chosen = [dimension.values for dimension in space if isinstance(dimension, Choices)]
    keys = [dimension.key for dimension in space]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*chosen)]


def boundary_combinations(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """For every key each value or end in turn, the others at their first: enough to see that all are allowed."""
    ends = {d.key: d.values if isinstance(d, Choices) else (d.low, d.high) for d in space}
    first = {key: values[0] for key, values in ends.items()}
    return [first, *(first | {key: value} for key, values in ends.items() for value in values[1:])]
