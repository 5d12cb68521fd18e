"""Plan a sweep: the keys that it varies, and their values, among a command's words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast, get_args, get_origin

from silotune.config import Config, dump, load_config
from silotune.config.keys import Keys
from silotune.config.trees import NAMED, SECTIONS, parse_word
from silotune.errors import InputError, needs, unknown_name_error
from silotune.lab.comparison import Cell, compared_methods, refuse_one_of_several, split_words, to_words
from silotune.methods import METHODS
from silotune.models.tuners import TUNERS
from silotune.runs.build.resolve import keys_of, read_config

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from pydantic import BaseModel

Space = Mapping[str, "BaseDistribution"]
"""Searched key → its values, as a distribution of optuna."""

_NOT_SEARCHED = ("seed", "data", "partition", "silos", "backbone", "attack", "compare", "per_method", "method.name")
"""Keys whose values cannot be ranked by a validation score: they change the data, the draws, the model or the
method."""


class Dimension(NamedTuple):
    """A key to search, its values as an optuna distribution, and the method it is for (None: all that have the key)."""

    key: str
    values: BaseDistribution
    method: str | None = None


def split_search(words: Iterable[str]) -> tuple[list[Dimension], list[str]]:
    """Split words into searched dimensions and all others.

    `key=a,b,c` lists values, `key=low..high` (or `low..high:log`) is a range; `per_method.moon.method.mu=…` is searched
    for that method only. A value in brackets, or of a key that takes a list, is one value.
    """
    dimensions: dict[tuple[str, str | None], Dimension] = {}
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
        if dimensions.setdefault((dimension.key, dimension.method), dimension) is not dimension:
            raise InputError(f"{key}: appears twice")
    return list(dimensions.values()), unsearched


def _dimension(key: str, text: str) -> Dimension | None:
    method, plain_key = None, key
    if key.startswith("per_method."):
        _, method, plain_key = ([*key.split(".", 2), ""])[:3]
        if method not in METHODS:
            raise unknown_name_error("key", f"per_method.{method}", [f"per_method.{name}" for name in METHODS])
    values = None if _takes_list(plain_key) else _distribution(key, text)
    return None if values is None else Dimension(plain_key, values, method)


def _distribution(key: str, text: str) -> BaseDistribution | None:
    """Parse `low..high`, `low..high:log` or `a,b,c`; None if the text is a single value."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, dots, high = text.partition("..")
    if dots and isinstance(_value(low), int | float):
        log = high.lower().endswith(":log")
        ends = _value(low), _value(high[:-4] if log else high)
        kind = IntDistribution if all(isinstance(end, int) for end in ends) else FloatDistribution
        try:
            return kind(*ends, log=log)
        except (TypeError, ValueError) as error:
            rule = "a range is low..high with low below high, or low..high:log with low also above 0"
            raise InputError(f"{key}: {rule} (got {text!r})") from error
    values = [_value(word) for word in text.split(",")]
    if len(values) == 1:
        return None
    if None in values:
        raise InputError(f"{key}: must be values with commas between (got {text!r})")
    if repeated := [value for position, value in enumerate(values) if value in values[:position]]:
        raise InputError(f"{key}: {repeated[0]!r} appears twice")
    return CategoricalDistribution(values)


def _value(text: str) -> Any:
    """Parse a value; YAML reads 1e-3 as text. None if it is empty."""
    value = parse_word(f"key={text}")[1]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
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
    return any(_is_list(field.annotation) for field in fields)


def _is_list(kind: Any) -> bool:
    """Whether a type is a list, or may be one, as `Words | None`."""
    return get_origin(kind) in (list, tuple) or any(map(_is_list, get_args(kind)))


def space_for_method(method: str, dimensions: Sequence[Dimension]) -> Space:
    """Return the search space of one method: its own keys take precedence, options that it lacks are left out."""
    own = {dimension.key for dimension in dimensions if dimension.method == method}
    options = {f"method.{name}" for name in METHODS[method].Options.model_fields}
    return {
        dimension.key: dimension.values
        for dimension in dimensions
        if dimension.method == method
        or (
            (dimension.method is None and dimension.key not in own)
            and (not dimension.key.startswith("method.") or dimension.key in options)
        )
    }


def all_combinations(space: Space) -> list[dict[str, Any]]:
    """Return all combinations of values; the last key changes fastest."""
    for key, values in space.items():
        if not hasattr(values, "choices"):
            raise InputError(f"{key}: a range needs a number of trials (--trials N)")
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*map(_ends, space.values()))]


def boundary_combinations(space: Space) -> list[dict[str, Any]]:
    """Return combinations that try each value (or end of a range) once, to check that all are allowed."""
    ends = {key: _ends(values) for key, values in space.items()}
    first = {key: values[0] for key, values in ends.items()}
    return [first, *(first | {key: value} for key, values in ends.items() for value in values[1:])]


def _ends(values: Any) -> tuple[Any, ...]:
    """Return the values of a list, or both ends of a range."""
    return tuple(values.choices) if hasattr(values, "choices") else (values.low, values.high)


@dataclass(frozen=True)
class Sweep:
    """A planned sweep: the words, keys (`given`) and seeds of every run, and each method's space."""

    source: str | Config
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    spaces: Mapping[str, Space]
    trials: int | None
    given: Keys = field(default_factory=lambda: Keys())

    @property
    def keys(self) -> list[str]:
        """All searched keys, in the given order."""
        return list(dict.fromkeys(key for space in self.spaces.values() for key in space))

    @cached_property
    def planned(self) -> list[tuple[str, int, dict[str, Any], list[Cell]]]:
        """Method, number, values and runs of every trial; for a sampler, of trials that try every value once."""
        combinations = all_combinations if self.trials is None else boundary_combinations
        return [
            (method, number, values, self.cells(method, values))
            for method, space in self.spaces.items()
            for number, values in enumerate(combinations(space), 1)
        ]

    def cells(self, method: str, values: Mapping[str, Any]) -> list[Cell]:
        """Return a trial's runs, one per seed.

        Their folders are named after a hash of the configuration. The hash leaves out the seed (by setting it to 0), so
        that all runs of a trial share it.
        """
        run_words, trial_words = [*self.words, f"method={method}"], to_words(values)
        configs = [
            read_config(self.source, [*run_words, f"seed={seed}"], trial_words, **self.given) for seed in self.seeds
        ]
        name = sha256(dump(configs[0].replace(seed=0)).encode()).hexdigest()[:10]
        return [Cell(f"{method}-{name}", config.seed, config) for config in configs]


def read_sweep(source: str | Config, words: Sequence[str], trials: int | None = None, **keys: Unpack[Keys]) -> Sweep:
    """Plan the sweep that a command asks for; the source's section `compare` lists methods if the words do not.

    The words are `method=a,b` (or `methods=`), `seeds=1,2`, keys to search (see `split_search`) and any others. The
    sampler makes so many `trials` per method; None: all combinations.
    """
    sweep_words, run_words = split_words([re.sub(r"^\s*method\s*=", "methods=", word) for word in words])
    for word in sweep_words:
        key = word.partition("=")[0].removeprefix("compare.")
        if key not in ("methods", "seeds"):
            raise InputError(f"{key}: belongs to compare, not to sweep")
    with needs("sweep: needs the package optuna", "sweep"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    dimensions, run_words = split_search(run_words)
    if not dimensions:
        raise InputError("sweep: nothing to search; give a key several values (train.lr=1e-3,5e-4) or a range")
    refuse_one_of_several(keys)
    values = cast("dict[str, object]", keys)
    base = load_config(keys_of(source), [*sweep_words, *run_words], keys=values)
    methods = compared_methods(base)
    spaces = {method: space_for_method(method, dimensions) for method in methods}
    searched = {key for space in spaces.values() for key in space}
    for dimension in dimensions:
        if dimension.method is not None and dimension.method not in methods:
            raise InputError(f"per_method.{dimension.method}: is not swept; methods are {', '.join(methods)}")
        if dimension.key not in searched:
            options = {f"method.{name}" for method in methods for name in METHODS[method].Options.model_fields}
            raise unknown_name_error("key", dimension.key, options)
    sweep = Sweep(source, tuple(run_words), tuple(base.compare.seeds or [base.seed]), spaces, trials, keys)
    _ = sweep.planned  # before anything runs: the configurations check their values
    return sweep
