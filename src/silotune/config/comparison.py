"""Section `compare`: methods, seeds, variants and best values of `silotune compare`; `silotune run` ignores it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from silotune.config.registries import METHODS
from silotune.config.section import Section
from silotune.config.validators import distinct

_SEEDS = range(2**31)


class StdConfig(Section):
    """The standard deviation over n seeds: its divisor is n − `ddof`."""

    ddof: Literal[0, 1] = 1


class CompareConfig(Section):
    """Entries and seeds of a comparison.

    Keys for one method alone are in the top-level `per_method`, which `silotune run` reads, too.

    Attributes:
        methods: the methods; if empty, the configuration's own method.
        seeds: the seeds; if empty, the configuration's own seed.
        ablation: whether the ablations of each method's paper are entries, too.
        variants: name of a variant → the keys that it changes; every method gets an entry for each variant. The key
            `preset` puts the source over another preset than the one that it names.
        grid: groups of variants; every method gets an entry for each choice of one variant from every group, and none
            of its own.
        best: folders of `silotune sweep`; each method takes its best values from them.
        std: the standard deviation over seeds.
    """

    methods: list[str] = []
    seeds: list[int] = []
    ablation: bool = False
    variants: dict[str, dict[str, Any]] = {}
    grid: dict[str, dict[str, dict[str, Any]]] = {}
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
    """Read a list, or words separated by commas, as distinct words."""
    items = given if isinstance(given, list) else str(given).split(",")
    words = [str(item).strip() for item in items]
    if given is None or isinstance(given, dict) or not all(words):
        raise ValueError(f"must be {what} with commas between (got {given!r})")
    return distinct(words)
