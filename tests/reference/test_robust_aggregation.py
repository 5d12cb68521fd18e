"""Median, trimmed mean, Krum and clipping against NumPy, and their promise that a few silos cannot shift them far."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silotune.aggregation import AGGREGATIONS, Update, clipped
from silotune.aggregation.robust import most_byzantine
from silotune.config.coordinator import AggregationConfig
from silotune.core.tensors import digest, flatten, unflatten
from silotune.errors import InputError
from silotune.runs.build.coordinator import make_aggregation
from silotune.training.coordinator import Coordinator

SHAPES = {"global/w": (4, 3), "global/b": (3,), "other/s": ()}
ROBUST = {
    "median": {},
    "trimmed-mean": {"trim": 0.2},
    "krum": {"byzantine": 2},
    "multi-krum": {"byzantine": 2},
}


def aggregate(name, updates, **options):
    return make_aggregation(AggregationConfig(name=name, **options), len(updates))(updates)


def random_updates(count, seed=0, dtype=torch.float32, spread=1.0, centre=0.0):
    draws = np.random.default_rng(seed)
    return [
        Update(
            f"silo-{number:02d}",
            {key: torch.tensor(centre + spread * draws.normal(size=s), dtype=dtype) for key, s in SHAPES.items()},
            int(draws.integers(1, 1000)),
        )
        for number in range(count)
    ]


def stacked(updates, key):
    return np.stack([update.tensors[key].double().numpy() for update in updates])


def flat(update):
    return np.concatenate([update.tensors[key].double().numpy().ravel() for key in SHAPES])


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-15)])
def test_median_is_numpys(count, dtype, tolerance):
    found = random_updates(count, dtype=dtype)
    result = aggregate("median", found)
    for key, shape in SHAPES.items():
        assert result[key].dtype is dtype
        assert tuple(result[key].shape) == shape
        np.testing.assert_allclose(result[key].numpy(), np.median(stacked(found, key), 0), rtol=tolerance, atol=1e-300)


@pytest.mark.parametrize(("count", "trim", "cut"), [(10, 0.1, 1), (10, 0.2, 2), (7, 0.2, 2), (3, 0.01, 1), (9, 0.4, 4)])
def test_trimmed_mean_by_hand(count, trim, cut):
    """`cut` values are dropped at each end of every coordinate, whichever silos they come from."""
    found = random_updates(count, seed=1, dtype=torch.float64)
    result = aggregate("trimmed-mean", found, trim=trim)
    for key in SHAPES:
        kept = np.sort(stacked(found, key), 0)[cut : count - cut]
        np.testing.assert_allclose(result[key].numpy(), kept.mean(0), rtol=1e-14)


def krum_by_hand(vectors, f):
    """Blanchard et al. 2017: the sum of squared distances to the n − f − 2 closest others."""
    n = len(vectors)
    scores = []
    for i in range(n):
        distances = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: n - f - 2]))
    return np.array(scores)


def test_krum_tolerates_f_of_two_f_and_three():
    for count in range(1, 12):
        possible = [f for f in range(count) if count >= 2 * f + 3]
        assert most_byzantine(count) == max(possible, default=0)


@pytest.mark.parametrize(("count", "f"), [(5, 1), (7, 2), (10, 3), (10, 0)])
def test_krum_and_multi_krum_by_hand(count, f):
    found = random_updates(count, seed=count, dtype=torch.float64)
    order = np.argsort(krum_by_hand([flat(update) for update in found], f))
    one = aggregate("krum", found, byzantine=f)
    assert digest(one) == digest(found[order[0]].tensors)
    for keep in (None, 1, 2, count - f):
        many = aggregate("multi-krum", found, byzantine=f, keep=keep)
        chosen = order[: count - f if keep is None else keep]
        for key in SHAPES:
            mean = stacked(found, key)[chosen].mean(0)
            np.testing.assert_allclose(many[key].numpy(), mean, rtol=1e-13, atol=1e-16)  # terms of size 1 may cancel


@pytest.mark.parametrize("keep", [None, 7])
def test_multi_krum_never_averages_more_than_can_be_honest(keep):
    """Three of ten silos are malicious, three honest ones absent: four are averaged, also with keep=7."""
    found = random_updates(7, seed=3, dtype=torch.float64)
    order = np.argsort(krum_by_hand([flat(update) for update in found], 2))  # 7 ≥ 2·2 + 3
    made = make_aggregation(AggregationConfig(name="multi-krum", byzantine=3, keep=keep), 10)
    for key in SHAPES:
        np.testing.assert_allclose(made(found)[key].numpy(), stacked(found, key)[order[:4]].mean(0), rtol=1e-12)
    assert digest(made(found[:2])) in {digest(update.tensors) for update in found[:2]}


def test_krum_defaults_to_the_largest_number_that_the_silos_allow():
    found = random_updates(10, seed=4, dtype=torch.float64)
    best = int(np.argmin(krum_by_hand([flat(update) for update in found], 3)))  # 10 ≥ 2·3 + 3
    assert digest(aggregate("krum", found)) == digest(found[best].tensors)


@given(seed=st.integers(0, 10_000), half=st.integers(1, 4), size=st.floats(1e2, 1e12))
@settings(max_examples=30, deadline=None)
def test_fewer_than_half_cannot_move_the_median_out_of_the_honest_range(seed, half, size):
    honest, found = 2 * half + 1 - half, random_updates(2 * half + 1, seed=seed, dtype=torch.float64)
    evil = [Update(u.silo, {key: t + size for key, t in u.tensors.items()}, 10**6) for u in found[honest:]]
    result = aggregate("median", found[:honest] + evil)
    for key in SHAPES:
        values = stacked(found[:honest], key)
        assert (result[key].numpy() >= values.min(0)).all()
        assert (result[key].numpy() <= values.max(0)).all()
    further = [Update(u.silo, {key: t * 3 + size for key, t in u.tensors.items()}, 1) for u in evil]
    assert digest(aggregate("median", found[:honest] + further)) == digest(result)  # how far out cannot matter


@given(seed=st.integers(0, 10_000), size=st.floats(1e2, 1e9), evil=st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_trimmed_values_do_not_matter(seed, size, evil):
    found = random_updates(10, seed=seed, dtype=torch.float64)
    high = [Update(u.silo, {key: t + size for key, t in u.tensors.items()}, 1) for u in found[:evil]]
    higher = [Update(u.silo, {key: t * 5 for key, t in u.tensors.items()}, 1) for u in high]
    one, other = (aggregate("trimmed-mean", some + found[evil:], trim=0.2) for some in (high, higher))
    for key in SHAPES:
        np.testing.assert_allclose(one[key].numpy(), other[key].numpy(), rtol=1e-12)
        assert (np.abs(one[key].numpy()) < 100).all()


@given(seed=st.integers(0, 10_000), distance=st.floats(50, 1e9), f=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_krum_picks_one_of_the_honest_cluster(seed, distance, f):
    """Krum with n = 2f + 3 picks an honest update although f distant silos agree with each other."""
    honest = random_updates(f + 3, seed=seed, dtype=torch.float64)
    evil = [
        Update(f"evil-{n}", {key: torch.full(s, distance, dtype=torch.float64) for key, s in SHAPES.items()}, 10**6)
        for n in range(f)
    ]
    result = aggregate("krum", evil + honest, byzantine=f)
    assert digest(result) in {digest(update.tensors) for update in honest}
    many = aggregate("multi-krum", evil + honest, byzantine=f)
    for key in SHAPES:
        np.testing.assert_allclose(many[key].numpy(), stacked(honest, key).mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ROBUST)
def test_any_order_gives_the_same_bits(name):
    """The functions themselves do not depend on order, also with ties, zeros of both signs and large numbers."""
    found = [*random_updates(3, seed=2, spread=2.0**30), *random_updates(4, seed=3)]
    found[1] = Update("twin", found[0].tensors, 5)
    zeros = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    found[5] = Update("plus", zeros, 1)
    found[6] = Update("minus", {key: -tensor for key, tensor in zeros.items()}, 1)
    found = [Update(f"{number}-{update.silo}", update.tensors, update.rows) for number, update in enumerate(found)]
    digests = {
        digest(aggregate(name, list(o), **ROBUST[name]))
        for o in itertools.islice(itertools.permutations(found), 0, 5040, 97)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("name", ROBUST)
def test_robust_aggregations_ignore_the_number_of_rows(name):
    found = random_updates(7, seed=5)
    boasting = [Update(update.silo, update.tensors, 10**9 if place == 3 else 1) for place, update in enumerate(found)]
    assert digest(aggregate(name, found, **ROBUST[name])) == digest(aggregate(name, boasting, **ROBUST[name]))


@pytest.mark.parametrize("name", ROBUST)
def test_equal_updates_are_kept_and_fewer_than_planned_are_still_combined(name):
    (first, *_) = random_updates(1)
    combine = make_aggregation(AggregationConfig(name=name, **ROBUST[name]), 7)
    for count in (7, 4, 2, 1):  # the others were refused
        found = [Update(f"s{number}", first.tensors, number + 1) for number in range(count)]
        assert digest(combine(found)) == digest(first.tensors)
    honest = random_updates(4, seed=8)
    result = combine(honest)
    for key in SHAPES:
        assert (result[key].numpy() <= stacked(honest, key).max(0) + 1e-6).all()


def test_clipping_by_hand():
    before, found = ({key: t * scale for key, t in random_updates(1, seed=9)[0].tensors.items()} for scale in (1, 3))
    update = Update("a", found, 7)
    change = flat(update) - flat(Update("", before, 1))
    norm = np.linalg.norm(change)
    result = clipped(update, before, norm / 4)
    np.testing.assert_allclose(flat(result), flat(Update("", before, 1)) + change / 4, rtol=1e-6, atol=1e-7)
    assert (result.silo, result.rows) == ("a", 7)
    assert clipped(update, before, norm * 1.0001) is update


FUNCTIONS = [name for name, made in AGGREGATIONS.items() if not hasattr(made, "aggregate")]
"""Those that read the broadcast are in `test_low_rank_aggregation.py`, `test_exact_products.py` and with FedALT."""


@pytest.mark.parametrize("name", [*FUNCTIONS, "trimmed-mean", "krum", "multi-krum"])
def test_every_aggregation_sees_clipped_changes(name):
    start = {key: torch.full(shape, 0.5) for key, shape in SHAPES.items()}
    found = random_updates(5, seed=3, centre=0.5)
    combine = make_aggregation(AggregationConfig(name=name), 5)
    coordinator = Coordinator(unflatten(start), combine, settings=AggregationConfig(outlier=None, clip=0.7))
    coordinator.aggregate(found)
    shortened = []
    for update in found:
        change = flat(update) - 0.5
        values, places = change * min(1, 0.7 / np.linalg.norm(change)) + 0.5, [0, *np.cumsum([12, 3, 1])]
        tensors = {
            key: torch.tensor(values[one:other].reshape(shape), dtype=torch.float32)
            for (key, shape), (one, other) in zip(SHAPES.items(), itertools.pairwise(places), strict=True)
        }
        shortened.append(Update(update.silo, tensors, update.rows))
    expected, plain = (Update("", combine(updates), 1) for updates in (shortened, found))
    np.testing.assert_allclose(flat(Update("", flatten(coordinator.shared), 1)), flat(expected), atol=1e-6)
    assert np.abs(flat(plain) - flat(expected)).max() > 0.01


@pytest.mark.parametrize("count", [3, 4, 5])
def test_multi_krum_leaves_one_out_at_least(count):
    """Krum's bound allows no malicious one of 3 or 4 silos; all are averaged only if `byzantine=0` is given."""
    values = [Update(f"s{n}", {"x": torch.tensor([float(n)])}, 1) for n in range(count - 1)]
    evil = Update("evil", {"x": torch.tensor([1e6])}, 1)
    assert aggregate("multi-krum", [*values, evil])["x"].item() == pytest.approx((count - 2) / 2)
    assert aggregate("multi-krum", [*values, evil], byzantine=0)["x"].item() > 1e5


@pytest.mark.parametrize("count", [5, 7, 11, 13, 15])
def test_a_refused_trim_names_an_allowed_one(count):
    with pytest.raises(InputError, match="allowed: up to ") as error:
        make_aggregation(AggregationConfig(name="trimmed-mean", trim=0.49), count)
    make_aggregation(AggregationConfig(name="trimmed-mean", trim=float(str(error.value).rpartition(" ")[2])), count)


REFUSED = {
    "trim-of-two": ("trimmed-mean", {"trim": 0.3}, 2, "aggregation.trim: 0.3 cuts 1 at each end, and only 2 silos"),
    "trim-too-much": ("trimmed-mean", {"trim": 0.45}, 4, "allowed: up to 0.25"),
    "krum-of-two": ("krum", {}, 2, "needs at least 3 silos in a round, but only 2"),
    "krum-too-many": ("krum", {"byzantine": 4}, 10, "4 malicious silos among 10.*allowed: up to 3"),
    "keep-too-many": ("multi-krum", {"keep": 8}, 10, "aggregation.keep: 8 .* 10, of which 3 may.*allowed: up to 7"),
}


@pytest.mark.parametrize(("name", "options", "silos", "message"), REFUSED.values(), ids=REFUSED)
def test_options_must_fit_the_number_of_silos(name, options, silos, message):
    with pytest.raises(InputError, match=message):
        make_aggregation(AggregationConfig(name=name, **options), silos)


def test_a_federation_counts_the_silos_of_a_round(tiny_federation):
    """With three silos Krum works, with two a round it is refused; a method without messages is accepted."""
    assert tiny_federation("fedavg", "aggregation=krum").coordinator.communicates
    with pytest.raises(InputError, match="needs at least 3 silos in a round, but only 2"):
        tiny_federation("fedavg", "aggregation=krum", "sampling.count=2")
    assert not tiny_federation("local", "aggregation=krum", "sampling.count=2").coordinator.communicates
    with pytest.raises(InputError, match="trim belongs to aggregation=trimmed-mean, not to aggregation=median"):
        tiny_federation("fedavg", "aggregation=median", "aggregation.trim=0.3")
