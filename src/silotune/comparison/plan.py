"""What a comparison runs: rows (methods, or variants of a method) × seeds, each cell one resolved configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from silotune.assembly import read_config
from silotune.config import Config
from silotune.config.schema import NAME_RULE, is_name
from silotune.errors import InputError, unknown
from silotune.methods import METHODS
from silotune.runs import write_text

FILE = "comparison.json"
Variants = Mapping[str, tuple[str, ...]]

ABLATIONS: Mapping[str, Variants] = {
    "fedmcp": {
        "without-contrastive": ("method.mu=0",),  # Table II, w/o CL
        "without-backbone": ("method.gamma=0",),  # Table II, w/o BL
        "cosine": ("method.similarity=cosine",),  # Figure 4
        "first-token": ("method.representation=first",),  # Figure 5
    }
}
"""Method → the variants of its paper's ablations: name → `key=value` words."""

_TABLE_1 = ("fedavg-full", "local", "fedavg", "fedlr", "fedap", "moon", "fedrep", "fedmatch", "fedmcp")
_PRESETS: Mapping[str, Mapping[str, str]] = {
    "table1-glue": {"methods": ",".join(_TABLE_1), "seeds": "1,2,3"},
    "table2-glue": {"methods": "fedmcp", "seeds": "1,2,3"},
}
"""What some presets bring along for a comparison. Those of `_ABLATED` also run the ablations."""
_ABLATED = ("table2-glue",)
_SEEDS = range(2**31)


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
    """The comparison that a command asks for.

    Args:
        source: a preset or a YAML file.
        words: `key=value`; `methods=a,b`, `seeds=1,2` and `std.ddof=0|1` are the comparison's own, the others go to
            every cell (over the preset's `per_method`).
        variants: own ones, each "name: key=value key=value".
        ablation: run the variants of the method's paper beside it.

    Raises:
        InputError: for any cell whose configuration cannot work; nothing has run by then.
    """
    own, rest = _split(words)
    brought = _PRESETS.get(source, {})
    methods = _methods(own.get("methods", brought.get("methods")), source, rest)
    seeds = _seeds(own.get("seeds", brought.get("seeds", "1")))
    ddof = own.get("std.ddof", "1")
    if ddof not in ("0", "1"):
        raise InputError(f"std.ddof: must be 0 or 1 (got {ddof!r})")
    cells = []
    for row, method, more in _rows(methods, _variants(variants), ablation or (source in _ABLATED and not variants)):
        for seed in seeds:
            config = read_config(source, [*rest, f"method={method}", f"seed={seed}", *more])
            cells.append(Cell(row, seed, config))
    rows = tuple(dict.fromkeys(cell.row for cell in cells))
    if len(cells) != len({cell.folder for cell in cells}):
        raise InputError("variants: two of them would have the same folder; choose other names")
    return Comparison(source, rows, seeds, int(ddof), tuple(cells))


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    own: dict[str, str] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip()
        if key in ("method", "method.name") and equals:
            raise InputError(f"{key}: a comparison has several; use methods={value or 'a,b'}")
        if key == "seed":
            raise InputError(f"seed: a comparison has several; use seeds={value or '1,2'}")
        if key in ("methods", "seeds", "std.ddof") and equals:
            own[key] = value.strip()
        else:
            rest.append(word)
    return own, rest


def _methods(text: str | None, source: str, words: Sequence[str]) -> tuple[str, ...]:
    names = [read_config(source, list(words)).method.name] if text is None else _listed("methods", text)
    for name in names:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    return tuple(names)


def _seeds(text: str) -> tuple[int, ...]:
    found = _listed("seeds", text)
    for seed in found:
        if not (seed.isascii() and seed.isdecimal()) or int(seed) not in _SEEDS:
            raise InputError(f"seeds: must be whole numbers from 0 to {_SEEDS[-1]} with commas between (got {text!r})")
    return tuple(int(seed) for seed in found)


def _listed(key: str, text: str) -> list[str]:
    words = [word.strip() for word in text.strip("[]").split(",")]
    if not all(words):
        raise InputError(f"{key}: must be names with commas between (got {text!r})")
    for position, word in enumerate(words):
        if word in words[:position]:
            raise InputError(f"{key}: {word!r} appears twice")
    return words


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


def _rows(methods: Iterable[str], own: Variants, ablation: bool) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    """(row, method, further words): every method, and behind it its variants."""
    for method in methods:
        yield method, method, ()
        if ablation and method not in ABLATIONS and not own:
            raise unknown("ablation of", method, ABLATIONS, or_else="or your own: --variant 'name: key=value'")
        found = dict(ABLATIONS.get(method, {}) if ablation else {}) | dict(own)
        for name, words in found.items():
            yield f"{method}-{name}", method, words
