"""Plan a comparison: a run (`Cell`) for every method, variant and seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, product
from pathlib import Path
from typing import Any, Unpack, cast

from silotune.config import Config, load_config
from silotune.config.keys import Keys
from silotune.config.paths import read_tree
from silotune.config.schema import CompareConfig
from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import write_text
from silotune.errors import InputError, unknown_name_error
from silotune.lab.report.entries import COMPARISON_FILE
from silotune.lab.report.judging_plan import JudgingPlan
from silotune.methods import METHODS
from silotune.runs.build.resolve import keys_of, read_config

Variants = Mapping[str, tuple[str, ...]]

_Entry = tuple[str, str, tuple[str, ...]]
"""(name, method, further words)"""


ABLATIONS: Mapping[str, Variants] = {
    "fedmcp": {
        "without-contrastive": ("method.mu=0",),  # Table II, w/o CL
        "without-backbone": ("method.gamma=0",),  # Table II, w/o BL
        "cosine": ("method.similarity=cosine",),  # Figure 4
        "first-token": ("method.representation=first",),  # Figure 5
        "private-view-full": ("method.private_view=full",),  # the other reading of eq. 5
    }
}
"""Method to the ablations of its paper: name of the variant to `key=value` words."""


BEST_FILE = "best.yaml"
"""The best values of a sweep, by method."""

TABLE = "sweep.csv"
"""The trials of a sweep with their validation scores."""

_COMPARISON_WORDS = ("methods", "seeds", "best", "std.ddof", "against", "margin")
"""Words that stand for keys of the section `compare`."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison; the name of its entry is the method, with its variant if there is one."""

    entry: str
    seed: int
    config: Config

    @property
    def folder(self) -> str:
        """Name of the run folder."""
        return f"{self.entry}-{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """All cells of a comparison, in the order of its table; the standard deviation's divisor is n − ddof."""

    source: str
    entries: tuple[str, ...]
    seeds: tuple[int, ...]
    ddof: int
    cells: tuple[Cell, ...]
    judging: JudgingPlan

    def write(self, out: Path) -> None:
        """Write entries, seeds, ddof and how entries are judged beside the run folders, for `silotune report`."""
        plan = {"source": self.source, "rows": self.entries, "seeds": self.seeds, "ddof": self.ddof}
        write_text(out / COMPARISON_FILE, json.dumps(plan | {"judging": self.judging.fields()}, indent=1) + "\n")


def read_comparison(
    source: str | Config,
    words: Sequence[str],
    variants: Sequence[str] = (),
    ablation: bool = False,
    only: Sequence[str] = (),
    **keys: Unpack[Keys],
) -> Comparison:
    """Plan the comparison that a command asks for; words take precedence over the source's section `compare`.

    `methods=a,b`, `seeds=1,2`, `best=FOLDER` (of a sweep) and `std.ddof=0|1` concern the comparison; the other words go
    to every cell, where they take precedence over a sweep's best values and `per_method`. Variants, each
    "name: key=value key=value", replace the source's variants, grid and ablations. `only` has patterns (`*`, `?`).
    """
    comparison_words, run_words = split_words(words)
    refuse_one_of_several(keys)
    values = cast("dict[str, object]", keys)
    base = load_config(keys_of(source), [*comparison_words, *run_words], keys=values)
    section = base.compare
    methods = compared_methods(base)
    seeds = tuple(section.seeds or [base.seed])
    best = read_best(section.best, methods)
    chosen_variants = _parse_variants(variants) or _variant_words(section.variants, "compare.variants")
    combined = {} if variants else _combined(section.grid)
    candidates = list(_entries(methods, chosen_variants, combined, ablation or (section.ablation and not variants)))
    cells = []
    for entry, method, variant_words in _matching(candidates, only):
        for seed in seeds:
            cell_words = [*best.get(method, ()), *run_words, f"method={method}", f"seed={seed}"]
            config = read_config(source, cell_words, variant_words, **keys)
            cells.append(Cell(entry, seed, config))
    entries = tuple(dict.fromkeys(cell.entry for cell in cells))
    folders = Counter((cell.entry, cell.seed) for cell in cells)
    if duplicate := next((entry for (entry, _), number in folders.items() if number > 1), None):
        raise InputError(f"variants: two entries would be called {duplicate!r}; choose another name for the variant")
    name = source if isinstance(source, str) else "Config"
    return Comparison(name, entries, seeds, section.std.ddof, tuple(cells), _judging(section, entries, methods))


def _judging(section: CompareConfig, entries: Sequence[str], methods: Sequence[str]) -> JudgingPlan:
    for key, label in (("against", section.against), ("primary", section.primary)):
        if label and label not in entries:
            raise InputError(f"compare.{key}: {unknown_name_error('entry', label, entries)}")
    looks = tuple(sorted(section.looks))
    remarks = tuple(remark for name in section.best for remark in sweep_remarks(Path(name), methods))
    return JudgingPlan(
        section.against, section.margin, section.claim, section.primary, section.metric, looks, remarks=remarks
    )


def words_of(methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return the words of a command line that name methods and seeds."""
    lists = {"methods": methods, "seeds": seeds}
    return [f"{key}={','.join(map(str, values))}" for key, values in lists.items() if values]


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into those of the comparison (as keys of `compare`) and those of every run."""
    comparison_words, run_words = [], []
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip()
        if key in ("method", "method.name") and equals:
            raise InputError(f"{key}: a comparison has several; use methods={value or 'a,b'}")
        if key == "seed":
            raise InputError(f"seed: a comparison has several; use seeds={value or '1,2'}")
        if key in _COMPARISON_WORDS and equals:
            comparison_words.append(f"compare.{key}={value}")
        else:
            run_words.append(word)
    return comparison_words, run_words


def refuse_one_of_several(keys: Keys) -> None:
    """Refuse the keys that are lists in a comparison."""
    method = keys.get("method")
    if isinstance(method, str) or (method is not None and "name" in method):
        raise InputError("method: many runs may have several; use methods=[…]")
    if "seed" in keys:
        raise InputError("seed: many runs may have several; use seeds=[…]")


def compared_methods(config: Config) -> tuple[str, ...]:
    """Return the methods that a configuration compares; its own method by default."""
    names = config.compare.methods or [config.method.name]
    for name in names:
        if name not in METHODS:
            raise InputError(f"compare.methods: {unknown_name_error('method', name, METHODS)}")
    return tuple(names)


def _parse_variants(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    variants: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, colon, words = text.partition(":")
        name = name.strip()
        if not colon or not words.split() or not is_name(name) or " " in name:
            raise InputError(
                f"--variant {text!r}: must be 'name: key=value key=value'; a name is {NAME_RULE} (no spaces)"
            )
        if name in variants:
            raise InputError(f"--variant {name!r} appears twice")
        variants[name] = tuple(words.split())
    return variants


def _variant_words(variants: Mapping[str, Mapping[str, object]], key: str) -> dict[str, tuple[str, ...]]:
    for name in variants:
        if not is_name(name) or " " in name:
            raise InputError(f"{key}: {name!r} cannot be a name; allowed: {NAME_RULE} (no spaces)")
    return {name: to_words(keys) for name, keys in variants.items()}


def _combined(grid: Mapping[str, Mapping[str, Mapping[str, object]]]) -> dict[str, tuple[str, ...]]:
    """Return a variant for each choice of one variant from every group; its name has theirs, in the groups' order."""
    if not grid:
        return {}
    groups = [_variant_words(variants, f"compare.grid.{group}") for group, variants in grid.items()]
    return {
        "-".join(names): tuple(chain.from_iterable(group[name] for group, name in zip(groups, names, strict=True)))
        for names in product(*groups)
    }


def _matching(entries: Sequence[_Entry], only: Sequence[str]) -> list[_Entry]:
    """Return the entries that one of the patterns fits."""
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name, *_ in entries):
            first, last = entries[0][0], entries[-1][0]
            raise InputError(f"--only {pattern!r}: fits none of the {len(entries)} entries ({first} … {last})")
    return [entry for entry in entries if not only or any(fnmatchcase(entry[0], pattern) for pattern in only)]


def _entries(methods: Iterable[str], variants: Variants, combined: Variants, ablation: bool) -> Iterable[_Entry]:
    """Yield every method, or its combined variants if there is a grid, followed by its variants."""
    for method in methods:
        for name, words in combined.items():
            yield f"{method}-{name}", method, words
        if not combined:
            yield method, method, ()
        if ablation and method not in ABLATIONS and not variants:
            raise unknown_name_error(
                "ablation of", method, ABLATIONS, or_else="or your own: --variant 'name: key=value'"
            )
        method_variants = dict(ABLATIONS.get(method, {}) if ablation else {}) | dict(variants)
        for name, words in method_variants.items():
            yield f"{method}-{name}", method, words


def to_words(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Convert dotted keys and values to `key=value` words."""
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items())


def read_best(folders: Sequence[str], methods: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read method → words of its best values from folders of sweeps, or their files; later ones take precedence."""
    best: dict[str, tuple[str, ...]] = {}
    for name in folders:
        path = Path(name) / BEST_FILE if Path(name).is_dir() else Path(name)
        if not path.is_file():
            raise InputError(f"best={name}: no finished sweep there (no {BEST_FILE})")
        entries = read_tree(path).get("per_method")
        if not isinstance(entries, dict) or not all(isinstance(keys, dict) for keys in entries.values()):
            raise InputError(f"best={name}: {path.name} must map methods to groups of keys under per_method")
        best |= {str(method): to_words(keys) for method, keys in entries.items()}
    missing = [method for method in methods if method not in best]
    if folders and missing:
        raise InputError(
            f"best={','.join(folders)}: has nothing for method {missing[0]!r}, only for {', '.join(best)}; sweep it too"
        )
    return best


def sweep_remarks(folder: Path, methods: Sequence[str]) -> Iterator[str]:
    """Yield what a sweep's trials leave open: values at the edge of what was searched, unequal numbers of trials."""
    import pandas

    if not (folder / TABLE).is_file():
        return
    table = pandas.read_csv(folder / TABLE)
    table = table[table["method"].isin(methods)]
    searched = list(table.columns[2 : list(table.columns).index("validation")])
    for row in table[table["best"] == "yes"].to_dict("records"):
        of_method = table[table["method"] == row["method"]]
        for key in searched:
            values = sorted({*pandas.to_numeric(of_method[key], errors="coerce").dropna()})
            if len(values) > 1 and (edge := {values[0]: "least", values[-1]: "largest"}.get(row[key])):
                yield f"{row['method']}: {key}={row[key]:g} is the {edge} value searched; a better one may lie beyond"
    trials = table["method"].value_counts(sort=False).to_dict()
    if len({*trials.values()}) > 1:
        yield f"Unequal numbers of trials: {', '.join(f'{method} {number}' for method, number in trials.items())}"
