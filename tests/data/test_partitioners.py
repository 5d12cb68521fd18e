"""Partitioners: every row in exactly one silo, minimum rows, seeds, and the skew that each of them is for."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from silotune.config.data import PartitionConfig
from silotune.config.section import has_effect
from silotune.config.validators import is_name
from silotune.data import partition as partitioners
from silotune.data.partition import partition_by_value, partition_rows, silo_names
from silotune.errors import InputError

DRAWN = ("iid", "dirichlet", "balanced", "quantity", "shards")


def rule(name: str, **options) -> PartitionConfig:
    if name == "balanced":
        name, options = "dirichlet", options | {"balanced": True}
    fitting = {key: value for key, value in options.items() if has_effect(PartitionConfig, key, name)}
    return PartitionConfig(name=name, **fitting)


def labels_of(rows: int, classes: int, seed: int, skewed: bool) -> list[int]:
    draws = np.random.default_rng(seed)
    shares = draws.dirichlet(np.full(classes, 0.3)) if skewed else np.full(classes, 1 / classes)
    return draws.choice(classes, size=rows, p=shares).tolist()


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(DRAWN),
    rows=st.integers(1, 400),
    silos=st.integers(1, 450),
    classes=st.integers(1, 6),
    skewed=st.booleans(),
    alpha=st.sampled_from([1e-300, 1e-4, 0.01, 0.1, 1.0, 100.0, 1e6]),
    least=st.integers(1, 12),
    shards=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_every_row_is_in_exactly_one_silo(name, rows, silos, classes, skewed, alpha, least, shards, seed):
    more = {"shards": shards} if name == "shards" else {}
    chosen = rule(name, silos=silos, alpha=alpha, min_rows=least, **more)
    labels = labels_of(rows, classes, seed, skewed)
    if rows < silos * least:
        with pytest.raises(InputError, match=r"^partition\.min_rows: .* but there are \d+; lower") as refused:
            partition_rows(labels, chosen, seed)
        assert "\n" not in str(refused.value)
        return
    groups = partition_rows(labels, chosen, seed)
    assert len(groups) == silos
    assert sorted(np.concatenate(groups).tolist()) == list(range(rows))
    assert min(map(len, groups)) >= least
    assert all((np.diff(group) > 0).all() for group in groups)
    again = partition_rows(labels, chosen, seed)
    assert all(np.array_equal(one, other) for one, other in zip(groups, again, strict=True))


@pytest.mark.parametrize("name", DRAWN)
def test_another_seed_another_partition(name):
    labels = labels_of(500, 3, 0, skewed=False)
    one, other = (partition_rows(labels, rule(name, silos=7), seed) for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", DRAWN)
def test_large_sets_and_extreme_skew_take_seconds(name):
    """What rejection sampling would never finish: 1,000 silos of at least 60 rows at α = 0.01."""
    labels = labels_of(67_349, 2, 0, skewed=False)
    started = time.perf_counter()
    groups = partition_rows(labels, rule(name, silos=1000, alpha=0.01, min_rows=60), 10)
    assert min(map(len, groups)) >= 60
    with pytest.raises(InputError, match="70000 rows, but there are 67349"):
        partition_rows(labels, rule(name, silos=1000, alpha=0.01, min_rows=70), 10)
    assert time.perf_counter() - started < 20


# -- what each is for -------------------------------------------------------------------------------------------------


def sizes(groups) -> np.ndarray:
    return np.array([len(group) for group in groups])


def largest_shares(labels: list[int], groups) -> float:
    """How much of a silo, on average, is of its most frequent label."""
    array = np.array(labels)
    return float(np.mean([np.bincount(array[group]).max() / len(group) for group in groups]))


@pytest.mark.parametrize("name", ["iid", "balanced"])
def test_equal_sizes(name):
    row_counts = sizes(partition_rows(labels_of(1003, 4, 1, skewed=False), rule(name, silos=10, alpha=0.05), 3))
    assert set(row_counts) == {100, 101}


@pytest.mark.parametrize("name", ["dirichlet", "balanced"])
def test_labels_are_the_more_skewed_the_smaller_alpha(name):
    labels = labels_of(6000, 3, 1, skewed=False)
    skews = [
        np.mean(
            [
                largest_shares(labels, partition_rows(labels, rule(name, silos=10, alpha=alpha), seed))
                for seed in range(5)
            ]
        )
        for alpha in (0.05, 1.0, 1e5)
    ]
    assert skews[0] > 0.85
    assert 0.5 < skews[1] < 0.75
    assert skews[2] < 0.38  # a third is even


def test_expected_shares_of_a_label_are_those_of_the_dirichlet():
    """Mean 1/K and variance (K − 1)/(K²(Kα + 1)) of a Dirichlet's components, over many seeds."""
    silos, alpha = 4, 0.5
    labels = [0] * 2000
    shares = np.array(
        [sizes(partition_rows(labels, rule("dirichlet", silos=silos, alpha=alpha), seed)) for seed in range(800)]
    )
    shares = shares / 2000
    assert shares.mean(axis=0) == pytest.approx(np.full(silos, 1 / silos), abs=0.04)
    expected = (silos - 1) / (silos**2 * (silos * alpha + 1))
    assert shares.var(axis=0) == pytest.approx(np.full(silos, expected), rel=0.2)


def test_expected_labels_of_a_balanced_silo_are_those_of_the_dirichlet():
    """The first silo draws before any label is used up."""
    labels = [0] * 1000 + [1] * 1000
    array = np.array(labels)
    chosen = rule("balanced", silos=40, alpha=0.5)
    share = np.array([array[partition_rows(labels, chosen, seed)[0]].mean() for seed in range(300)])
    assert share.mean() == pytest.approx(0.5, abs=0.05)
    assert share.var() == pytest.approx(1 / 8, rel=0.2)  # (K − 1)/(K²(Kα + 1)) for K = 2, and little sampling noise


def test_quantity_skews_sizes_and_not_labels():
    labels = labels_of(6000, 2, 1, skewed=False)
    skewed, even = (partition_rows(labels, rule("quantity", silos=10, alpha=alpha), 4) for alpha in (0.3, 1e5))
    assert sizes(even) == pytest.approx(600, rel=0.05)
    assert sizes(skewed).max() > 4 * np.median(sizes(skewed))
    array = np.array(labels)
    shares = [array[group].mean() for group in skewed if len(group) > 200]
    assert shares == pytest.approx([0.5] * len(shares), abs=0.1)


def test_shards_hold_few_labels_and_cut_at_equal_sizes():
    labels = [row % 5 for row in range(1000)]
    groups = partition_rows(labels, rule("shards", silos=10, shards=2), 1)
    assert set(sizes(groups)) == {100}
    array = np.array(labels)
    assert all(len(np.unique(array[group])) <= 2 for group in groups)  # 20 shards of 50, 200 rows a label
    assert any(len(np.unique(array[group])) == 2 for group in groups)


def test_rows_for_poor_silos_are_drawn_from_all_rows_of_the_largest():
    """200 of 1,000 rows have a mean index near 499.5 (standard error 18); the last 200 would have 899.5."""
    groups = partitioners.ensure_minimum([np.arange(1000), np.array([1000])], 201, np.random.default_rng(3))
    given_away = groups[1][groups[1] < 1000]
    assert len(given_away) == 200
    assert abs(given_away.mean() - 499.5) < 90


# -- natural silos ----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["books", "films", "a/b", "a b", "…", "a_b"]), min_size=2, max_size=40))
def test_by_value_conserves_rows(values):
    if len(set(values)) < 2:
        with pytest.raises(InputError, match="only one value"):
            partition_by_value(values, 1)
        return
    groups = partition_by_value(values, 1)
    assert sorted(row for group in groups.values() for row in group.tolist()) == list(range(len(values)))
    assert len(groups) == len(set(values))
    assert all(len({values[row] for row in group}) == 1 for group in groups.values())


def test_values_become_names_that_can_be_folders():
    groups = partition_by_value(["../x", "x", "_x", "é", "b c", "b c"], 1)
    assert sorted(groups) == ["b c", "silo", "x", "x-2", "x-3"]
    assert groups["b c"].tolist() == [4, 5]


@given(st.lists(st.text(min_size=1, max_size=100), min_size=2, max_size=8, unique=True))
@example(["North", "north", "NORTH", "north-2"])
@example(["a" * 90, "a" * 91, "A" * 92])
@example(['x" worker="/tmp/other', "x__worker___tmp_other", "a\nb", "end.", "end"])
def test_any_values_become_names_that_can_be_files_and_nodes(values):
    """No two of them are one to a file system that ignores case."""
    names = list(partition_by_value(values, 1))
    assert len({name.lower() for name in names}) == len(values)
    assert all(is_name(name) and len(name.encode()) < 100 for name in names)


def test_natural_silos_cannot_be_given_rows():
    with pytest.raises(InputError, match=r"^partition\.min_rows: 'b' has only 1 rows; at least 2 are asked for$"):
        partition_by_value(["a", "a", "b"], 2)
    with pytest.raises(InputError, match=r"^partition\.column: missing or empty in 2 of 4 rows$"):
        partition_by_value(["a", "", "b", ""], 1)


def test_names_are_in_order():
    assert silo_names(3) == ["silo-1", "silo-2", "silo-3"]
    assert silo_names(100) == sorted(silo_names(100))
