"""`split_search` finds the keys that a sweep varies, as `Choices` or `Range`; `all_combinations` is the grid."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from silotune.config.schema import Config
from silotune.config.trees import NAMED, SECTIONS, parse_word
from silotune.errors import InputError, unknown_name_error
from silotune.methods import METHODS
from silotune.models.tuners import TUNERS

_RANGE_START = re.compile(r"[-+]?\.?\d[^/]*\.\.")  # does not match ../folder

_RANGE = re.compile(r"\s*(?P<low>[^\s:]+?)\.\.(?P<high>[^\s:]+?)(?P<log>:log)?\s*")

_NOT_SEARCHED = ("seed", "data", "partition", "silos", "backbone", "attack", "compare", "per_method", "method.name")
"""Keys whose values cannot be ranked by a validation score: they change the data, the draws, the model or the
method."""

_DIGITS = 4  # significant digits of a number drawn from a range


@dataclass(frozen=True)
class Choices:
    """A key and its candidate values, in the given order."""

    key: str
    values: tuple[Any, ...]
    method: str | None = None
    """The only method to search it for; None for every method that has the key."""


@dataclass(frozen=True)
class Range:
    """A key and a range of numbers, both ends included; whole numbers if both ends are. `log`: log-uniform."""

    key: str
    low: float
    high: float
    log: bool
    method: str | None = None

    @property
    def is_integer(self) -> bool:
        """Whether the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def rounded(self, value: float) -> float:
        """Round a drawn value to a few digits, so that it can be written down."""
        return value if self.is_integer else min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


Dimension = Choices | Range


def split_search(words: Iterable[str]) -> tuple[list[Dimension], list[str]]:
    """Split words into searched dimensions and all others.

    `key=a,b,c` lists values, `key=low..high` (or `low..high:log`) is a range; `per_method.moon.method.mu=…` is searched
    for that method only. A value in brackets, or of a key that takes a list, is one value.
    """
    dimensions: list[Dimension] = []
    unsearched = []
    for word in words:
        key, equals, text = (piece.strip() for piece in word.partition("="))
        dimension = _dimension(key, text) if equals and not text.startswith(("[", "{", '"', "'")) else None
        if dimension is None:
            unsearched.append(word)
            continue
        if any(dimension.key == name or dimension.key.startswith(f"{name}.") for name in _NOT_SEARCHED):
            raise InputError(
                f"{key}: cannot be searched (scores would not be comparable); give one value, quoted if it has commas"
            )
        if any((earlier.key, earlier.method) == (dimension.key, dimension.method) for earlier in dimensions):
            raise InputError(f"{key}: appears twice")
        dimensions.append(dimension)
    return dimensions, unsearched


def _dimension(key: str, text: str) -> Dimension | None:
    method, plain_key = None, key
    if key.startswith("per_method."):
        _, method, plain_key = ([*key.split(".", 2), ""])[:3]
        method = METHODS.canonical(method)
        if method not in METHODS:
            raise unknown_name_error("key", f"per_method.{method}", [f"per_method.{name}" for name in METHODS])
    if _takes_list(plain_key):
        return None
    if _RANGE_START.match(text):
        return _range(plain_key, text, method)
    if "," not in text:
        return None
    values = [_number(parse_word(f"{key}={word}")[1]) for word in text.split(",")]
    if any(value is None for value in values):
        raise InputError(f"{key}: must be values with commas between (got {text!r})")
    for position, value in enumerate(values):
        if value in values[:position]:
            raise InputError(f"{key}: {value!r} appears twice")
    return Choices(plain_key, tuple(values), method)


def _range(key: str, text: str, method: str | None) -> Range:
    match = _RANGE.fullmatch(text)
    ends = [match["low"], match["high"]] if match else ["", ""]
    low, high = (_number(parse_word(f"{key}={end}")[1]) for end in ends)
    finite = [isinstance(end, (int, float)) and not isinstance(end, bool) and math.isfinite(end) for end in (low, high)]
    if match is None or not all(finite):
        raise InputError(f"{key}: a range is low..high, or low..high:log (got {text!r})")
    assert isinstance(low, (int, float))
    assert isinstance(high, (int, float))
    if low >= high or (match["log"] and low <= 0):
        bound = "above 0 and below" if match["log"] else "below"
        raise InputError(f"{key}: the low end must be {bound} the high one (got {text!r})")
    return Range(key, low, high, bool(match["log"]), method)


def _number(value: Any) -> Any:
    """Convert text to a number if possible: YAML reads 1e-3 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _takes_list(key: str) -> bool:
    """Whether a configuration key takes a list, for any tuner or method that has the key."""
    section, _, last = key.rpartition(".")
    if key in NAMED:  # `tuner=lora` is short for `tuner.name=lora`
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
    """Return the dimensions for one method: its own take precedence, options that it does not have are left out."""
    options = METHODS[method].Options.model_fields
    own_keys = {d.key for d in dimensions if d.method == method}
    space = []
    for dimension in dimensions:
        option = dimension.key.removeprefix("method.")
        if dimension.method == method or (
            dimension.method is None
            and dimension.key not in own_keys
            and (option == dimension.key or option in options)
        ):
            space.append(dimension)
    return tuple(space)


def all_combinations(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Return all combinations of values; the last key changes fastest."""
    for dimension in space:
        if isinstance(dimension, Range):
            raise InputError(f"{dimension.key}: a range needs a number of trials (--trials N)")
    chosen = [dimension.values for dimension in space if isinstance(dimension, Choices)]
    keys = [dimension.key for dimension in space]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*chosen)]


def boundary_combinations(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Return combinations that try each value (or end of a range) once, to check that all are allowed."""
    ends = {d.key: d.values if isinstance(d, Choices) else (d.low, d.high) for d in space}
    first = {key: values[0] for key, values in ends.items()}
    return [first, *(first | {key: value} for key, values in ends.items() for value in values[1:])]
