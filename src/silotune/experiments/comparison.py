"""What a comparison runs: rows (methods, or variants of one) × seeds, each cell one resolved configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from silotune.config import Config, load_config
from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import write_text
from silotune.errors import InputError, unknown
from silotune.experiments.best_values import read_best, to_words
from silotune.methods import METHODS
from silotune.runs.build.resolve import METHOD_DEFAULTS, read_config

FILE = "comparison.json"

Variants = Mapping[str, tuple[str, ...]]


ABLATIONS: Mapping[str, Variants] = {
    "fedmcp": {
        "without-contrastive": ("method.mu=0",),  # Table II, w/o CL
        "without-backbone": ("method.gamma=0",),  # Table II, w/o BL
        "cosine": ("method.similarity=cosine",),  # Figure 4
        "first-token": ("method.representation=first",),  # Figure 5
        "private-view-full": ("method.private_view=full",),  # the other reading of eq. 5
    }
}
"""Method → the variants of its paper's ablations: name → `key=value` words."""


_OWN = ("methods", "seeds", "best", "std.ddof")
"""Words of a comparison that are short for keys of `compare`."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison. `row` is the method, with the variant where there is one."""

    row: str
    seed: int
    config: Config

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.row}-{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """All cells, in the order of the table. `ddof`: of the standard deviation over seeds (the divisor is n − ddof)."""

    source: str
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    ddof: int
    cells: tuple[Cell, ...]

    def write(self, out: Path) -> None:
        """Leave rows, seeds and ddof beside the run folders, so that `silotune report` finds them."""
        found = {"source": self.source, "rows": self.rows, "seeds": self.seeds, "ddof": self.ddof}
        write_text(out / FILE, json.dumps(found, indent=1) + "\n")


def read_comparison(
    source: str, words: Sequence[str], variants: Sequence[str] = (), ablation: bool = False
) -> Comparison:
    """The comparison that a command asks for, over what the source's `compare` section says.

    Args:
        source: a preset or a YAML file.
        words: `key=value`; `methods=a,b`, `seeds=1,2`, `best=FOLDER` (of a sweep) and `std.ddof=0|1` are the
            comparison's own, the others go to every cell (over a sweep's best values and the source's `per_method`).
        variants: own ones, each "name: key=value key=value"; they replace those of the source, ablations included.
        ablation: run the variants of the method's paper beside it.

    Raises:
        InputError: for any cell whose configuration cannot work; nothing has run by then.
    """
    own, rest = split_words(words)
    base = load_config(source, [*own, *rest], METHOD_DEFAULTS)
    asked = base.compare
    methods = compared_methods(base)
    seeds = tuple(asked.seeds or [base.seed])
    best = read_best(asked.best, methods)
    chosen = _variants(variants) or _named(asked.variants)
    cells = []
    for row, method, more in _rows(methods, chosen, ablation or (asked.ablation and not variants)):
        for seed in seeds:
            config = read_config(source, [*best.get(method, ()), *rest, f"method={method}", f"seed={seed}"], more)
            cells.append(Cell(row, seed, config))
    rows = tuple(dict.fromkeys(cell.row for cell in cells))
    names = [(cell.row, cell.seed) for cell in cells]
    if twice := next((row for position, (row, seed) in enumerate(names) if (row, seed) in names[:position]), None):
        raise InputError(f"variants: two rows would be called {twice!r}; choose another name for the variant")
    return Comparison(source, rows, seeds, asked.std.ddof, tuple(cells))


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The comparison's own words, as keys of `compare`, and those of every cell."""
    own, rest = [], []
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip()
        if key in ("method", "method.name") and equals:
            raise InputError(f"{key}: a comparison has several; use methods={value or 'a,b'}")
        if key == "seed":
            raise InputError(f"seed: a comparison has several; use seeds={value or '1,2'}")
        if key in _OWN and equals:
            own.append(f"compare.{key}={value}")
        else:
            rest.append(word)
    return own, rest


def compared_methods(config: Config) -> tuple[str, ...]:
    """The methods that a configuration compares: its own one where it does not say.

    Raises:
        InputError: for an unknown one.
    """
    names = config.compare.methods or [config.method.name]
    for name in names:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    return tuple(names)


def _variants(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, colon, words = text.partition(":")
        name = name.strip()
        if not colon or not words.split() or not is_name(name) or " " in name:
            raise InputError(
                f"--variant {text!r}: must be 'name: key=value key=value'; a name is {NAME_RULE} (no spaces)"
            )
        if name in found:
            raise InputError(f"--variant {name!r} appears twice")
        found[name] = tuple(words.split())
    return found


def _named(variants: Mapping[str, Mapping[str, object]]) -> dict[str, tuple[str, ...]]:
    for name in variants:
        if not is_name(name) or " " in name:
            raise InputError(f"compare.variants: {name!r} cannot be a name; allowed: {NAME_RULE} (no spaces)")
    return {name: to_words(keys) for name, keys in variants.items()}


def _rows(methods: Iterable[str], own: Variants, ablation: bool) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    """(row, method, further words): every method, and behind it its variants."""
    for method in methods:
        yield method, method, ()
        if ablation and method not in ABLATIONS and not own:
            raise unknown("ablation of", method, ABLATIONS, or_else="or your own: --variant 'name: key=value'")
        found = dict(ABLATIONS.get(method, {}) if ablation else {}) | dict(own)
        for name, words in found.items():
            yield f"{method}-{name}", method, words
