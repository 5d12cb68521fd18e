"""What a sweep searches, read from words. Nothing trains here."""

from __future__ import annotations

import re

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from silotune.errors import InputError
from silotune.lab.search_space import Dimension, all_combinations, boundary_combinations, read_sweep, split_search


def test_values_ranges_and_what_is_neither() -> None:
    words = [
        "train.lr=1e-3,5e-4",
        "method.gamma=0.1..0.9",
        "train.epochs=1..3",
        "method.mu=0.01..0.2:log",
        "tuner=lora,bottleneck",
        "per_method.moon.method.mu=0.1,1,5",
        "data.tasks=alpha,beta",  # a list of its own
        "data.labels=no,yes",
        "data.path=../somewhere",
        "tuner.sites=[a,b]",
        "tuner.sites=query,value",
        "per_method.fedmcp.tuner.sites=query,value",
        "uplink=clip,int8",
        "uplink.name=clip,int8",
        "head.template='a, b'",
        "rounds=3",
    ]
    found, rest = split_search(words)
    assert found == [
        Dimension("train.lr", CategoricalDistribution((1e-3, 5e-4))),
        Dimension("method.gamma", FloatDistribution(0.1, 0.9)),
        Dimension("train.epochs", IntDistribution(1, 3)),
        Dimension("method.mu", FloatDistribution(0.01, 0.2, log=True)),
        Dimension("tuner", CategoricalDistribution(("lora", "bottleneck"))),
        Dimension("method.mu", CategoricalDistribution((0.1, 1, 5)), method="moon"),
    ]
    assert rest == words[6:]


def test_every_combination_once_and_every_end_seen() -> None:
    space = {"a": CategoricalDistribution((1, 2)), "b": CategoricalDistribution(("x", "y", "z"))}
    assert all_combinations(space) == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y", "z")]
    assert all_combinations({}) == [{}]
    ends = boundary_combinations({"a": CategoricalDistribution((1, 2)), "b": FloatDistribution(0.5, 4.0)})
    assert ends == [{"a": 1, "b": 0.5}, {"a": 2, "b": 0.5}, {"a": 1, "b": 4.0}]


def test_each_method_has_its_own_space() -> None:
    words = ["method=local,moon,fedmcp", "train.lr=1e-3,1e-4", "method.mu=0.05,0.1", "per_method.moon.method.mu=1,5"]
    sweep = read_sweep("demo", words)
    assert {method: [(key, d.choices) for key, d in space.items()] for method, space in sweep.spaces.items()} == {
        "local": [("train.lr", (1e-3, 1e-4))],
        "moon": [("train.lr", (1e-3, 1e-4)), ("method.mu", (1, 5))],
        "fedmcp": [("train.lr", (1e-3, 1e-4)), ("method.mu", (0.05, 0.1))],
    }
    assert sweep.keys == ["train.lr", "method.mu"]
    (cell,) = sweep.cells("moon", {"train.lr": 1e-4, "method.mu": 5})
    assert (cell.config.method.name, cell.config.train.lr, cell.config.method.options["mu"]) == ("moon", 1e-4, 5)
    other = read_sweep("demo", [*words, "seeds=3,4"]).cells("moon", {"train.lr": 1e-4, "method.mu": 5})
    assert [c.folder for c in other] == [
        f"{cell.entry}-3",
        f"{cell.entry}-4",
    ]  # one trial: it differs in the seed alone


def test_a_comparisons_methods_are_swept_where_none_are_named() -> None:
    sweep = read_sweep("mixed6", ["data.path=nowhere", "train.lr=1e-3,5e-4"])
    assert len(sweep.spaces) == 9
    assert sweep.seeds == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("words", "trials", "named"),
    [
        (["method=local"], None, "nothing to search"),
        (["method=lokal", "train.lr=1,2"], None, "did you mean 'local'"),
        (["method=local", "method.gamma=0.1,0.2"], None, "method.gamma"),
        (["method=fedmcp", "method.gama=0.1,0.2"], None, "did you mean 'method.gamma'"),
        (["train.lr=1e-4..1e-2"], None, "--trials"),
        (["train.lr=1e-2..1e-4"], 3, "train.lr"),
        (["train.lr=0..1:log"], 3, "above 0"),
        (["train.lr=0..1"], 3, "train.lr"),  # 0 is not allowed there
        (["train.lr=1..x"], 3, "low..high"),
        (["train.lr=1..{"], 3, "low..high"),
        (["train.lr=1..2001-99-99"], 3, "low..high"),
        (["train.lr=1e-3,,1e-4"], None, "train.lr"),
        (["train.lr=1e-3,1e-3"], None, "appears twice"),
        (["train.lr=1e-3,0.001"], None, "train.lr: 0.001 appears twice"),
        (["train.lr=1e-3,1e-4", "train.lr=1,2"], None, "train.lr: appears twice"),
        (["train.lr=1e-3,0"], None, "train.lr"),
        (["data.train_rows=10,20"], None, "data.train_rows"),
        (["partition.alpha=0.1..1"], 3, "partition.alpha"),
        (["seed=1,2"], None, "seeds="),
        (["std.ddof=0", "train.lr=1,2"], None, "std.ddof"),
        (["best=x", "train.lr=1,2"], None, "best"),
        (["per_method.moon.method.mu=1,5"], None, "per_method.moon"),
        (["per_method.moan.method.mu=1,5"], None, "did you mean 'per_method.moon'"),
    ],
)
def test_a_bad_sweep_is_refused(words: list[str], trials: int | None, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)) as refused:
        read_sweep("demo", words, trials)
    assert "\n" not in str(refused.value)
