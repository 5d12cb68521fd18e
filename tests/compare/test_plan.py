"""What a comparison runs: rows, seeds, and each cell's configuration. Nothing trains here."""

from __future__ import annotations

import re

import pytest

from silotune.comparison import read_comparison
from silotune.errors import InputError

NINE = ("fedavg-full", "local", "fedavg", "fedlr", "fedap", "moon", "fedrep", "fedmatch", "fedmcp")


def test_table_1_has_the_papers_nine_rows_three_times() -> None:
    found = read_comparison("table1-glue", ["data.path=nowhere"])
    assert found.rows == NINE
    assert found.seeds == (1, 2, 3)
    assert [cell.folder for cell in found.cells[:4]] == [
        "fedavg-full-1", "fedavg-full-2", "fedavg-full-3", "local-1",
    ]  # fmt: skip
    configs = {cell.row: cell.config for cell in found.cells}
    assert {(c.rounds, c.train.lr, c.train.batch_size, c.data.rows_per_silo) for c in configs.values()} == {
        (25, 5e-4, 64, 4076)
    }
    adapters = {row: config.method.options.get("adapters") for row, config in configs.items()}
    assert [adapters[row] for row in ("local", "fedavg", "moon", "fedrep")] == [2, 2, 2, 2]
    assert [adapters[row] for row in ("fedap", "fedlr")] == [1, 1]
    tuners = {row: (config.tuner.name, config.tuner.options.get("r")) for row, config in configs.items()}
    assert tuners["fedlr"] == ("lora", 16)
    assert tuners["fedap"] == tuners["fedmcp"] == ("bottleneck", 16)
    assert tuners["fedavg-full"][0] == "full"


def test_table_2_has_the_ablations_of_the_paper() -> None:
    found = read_comparison("table2-glue", ["data.path=nowhere", "seeds=5"])
    options = {cell.row: cell.config.method.options for cell in found.cells}
    whole = options.pop("fedmcp")
    assert (whole["gamma"], whole["mu"], whole["similarity"], whole["representation"]) == (0.5, 0.05, "cka", "mean")
    changed = {row: {k: v for k, v in o.items() if whole[k] != v} for row, o in options.items()}
    assert changed == {
        "fedmcp-without-contrastive": {"mu": 0},
        "fedmcp-without-backbone": {"gamma": 0},
        "fedmcp-cosine": {"similarity": "cosine"},
        "fedmcp-first-token": {"representation": "first"},
    }


def test_own_variants_stand_behind_every_method() -> None:
    found = read_comparison("demo", ["methods=local,fedavg"], ["slow: train.lr=1e-4 rounds=2"])
    assert found.rows == ("local", "local-slow", "fedavg", "fedavg-slow")
    assert [(cell.config.train.lr, cell.config.rounds) for cell in found.cells] == [(1e-3, 6), (1e-4, 2)] * 2


def test_overrides_per_method_hold_for_that_method() -> None:
    words = ["methods=local,fedavg", "per_method.local={train.lr: 5e-4}"]
    found = read_comparison("demo", words)
    assert [cell.config.train.lr for cell in found.cells] == [5e-4, 1e-3]


def test_without_methods_and_seeds_it_is_the_presets_own_method_once() -> None:
    found = read_comparison("demo", [])
    assert [cell.folder for cell in found.cells] == ["fedmcp-1"]
    assert found.ddof == 1


@pytest.mark.parametrize(
    ("words", "variants", "ablation", "named"),
    [
        (["methods=fedmpc"], [], False, "did you mean 'fedmcp'"),
        (["methods=local,,fedavg"], [], False, "methods"),
        (["methods=local,local"], [], False, "'local' appears twice"),
        (["seeds=1,x"], [], False, "seeds"),
        (["seeds=-1"], [], False, "seeds"),
        (["seeds=1,1"], [], False, "'1' appears twice"),
        (["seed=3"], [], False, "seeds=3"),
        (["method=local"], [], False, "methods=local"),
        (["std.ddof=2"], [], False, "std.ddof"),
        (["methods=local,fedmcp", "method.gamma=0.2"], [], False, "method.gamma"),
        ([], ["slow"], False, "--variant 'slow'"),
        ([], ["a b: rounds=1"], False, "--variant"),
        ([], ["a: rounds=1", "a: rounds=2"], False, "'a' appears twice"),
        ([], ["a: rounds=0"], False, "rounds"),
        (["methods=fedavg"], [], True, "'fedavg'"),
    ],
)
def test_a_bad_comparison_is_refused(words: list[str], variants: list[str], ablation: bool, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)) as refused:
        read_comparison("demo", words, variants, ablation)
    assert "\n" not in str(refused.value)
