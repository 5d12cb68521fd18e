"""The section `compare`: methods, seeds and variants of `silotune compare`; `silotune run` ignores it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from silotune.config.registries import METHODS
from silotune.config.section import Section
from silotune.config.validators import distinct

_SEEDS = range(2**31)


class StdConfig(Section):
    """Of the standard deviation over seeds: its divisor is n − `ddof`."""

    ddof: Literal[0, 1] = 1


class CompareConfig(Section):
    """Rows and seeds of a comparison; where none are given, the configuration's own method and seed.

    `ablation`: also the ablations of each method's paper; `variants`: name → keys that differ, behind every method;
    `best`: folders of `silotune sweep`, whose best values each method takes. What holds for one method alone is in
    the top-level `per_method`, which `run` heeds too.
    """

    methods: list[str] = []
    seeds: list[int] = []
    ablation: bool = False
    variants: dict[str, dict[str, Any]] = {}
    best: list[str] = []
    std: StdConfig = StdConfig()

    @field_validator("methods", mode="before")
    @classmethod
    def _methods(cls, given: object) -> list[str]:
        return distinct([METHODS.canonical(name) for name in _listed(given, "names")])

    @field_validator("best", mode="before")
    @classmethod
    def _names(cls, given: object) -> list[str]:
        return _listed(given, "names")

    @field_validator("seeds", mode="before")
    @classmethod
    def _numbers(cls, given: object) -> list[int]:
        what = f"whole numbers from 0 to {_SEEDS[-1]}"
        words = _listed(given, what)
        if not all(word.isascii() and word.isdecimal() and int(word) in _SEEDS for word in words):
            raise ValueError(f"must be {what} with commas between (got {given!r})")
        return [int(word) for word in words]


def _listed(given: object, what: str) -> list[str]:
    """A list, or words with commas between."""
    items = given if isinstance(given, list) else str(given).split(",")
    words = [str(item).strip() for item in items]
    if given is None or isinstance(given, dict) or not all(words):
        raise ValueError(f"must be {what} with commas between (got {given!r})")
    return distinct(words)
