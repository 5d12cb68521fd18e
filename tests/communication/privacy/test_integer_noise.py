"""Rounded noise against its exact probabilities, and clipped whole numbers against their bound, in other arithmetic."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from silotune.communication.privacy.integer_noise import (
    GAUSSIAN,
    LAPLACE,
    Law,
    grid_of,
    integer_vector,
    rounded_numbers,
)
from silotune.communication.privacy.noise import NoiseStream, whole_tensors, with_noise

SCALE = 2.0**20 * 0.8125
LAWS = {"gaussian": GAUSSIAN, "laplace": LAPLACE}


def tail(name: str, x: mpmath.mpf) -> mpmath.mpf:
    """The probability of more than x ≥ 0, by mpmath's own functions."""
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2 if name == "gaussian" else mpmath.exp(-x) / 2


def drawn(name: str, tails: list[int], scale: float = SCALE, further: int = 2**63) -> list[int]:
    """The numbers whose tails have these first 63 bits (of 64)."""
    return rounded_numbers(np.array(tails, dtype="<u8"), lambda _: further, scale, LAWS[name])[0].tolist()


@pytest.mark.parametrize("name", LAWS)
def test_every_number_lies_in_the_cell_of_its_bits(name):
    """For random bits, tiny tails, and the first bits beyond each side of an edge, which float64 cannot tell apart."""
    draws = np.random.default_rng(3)
    tails = [int(bits) for bits in draws.integers(0, 2**63, 400)] + [2**power for power in range(63)] + [0, 2**63 - 1]
    with mpmath.workdps(50):
        for whole in draws.integers(0, int(5 * SCALE), 100):
            edge = int(mpmath.floor(tail(name, (int(whole) + mpmath.mpf("0.5")) / SCALE) * 2**64))
            tails += [edge - 1, edge, edge + 1]
        for bits, number in zip(tails, drawn(name, tails), strict=True):
            above = tail(name, (number - mpmath.mpf("0.5")) / SCALE) if number else mpmath.mpf("0.5")
            assert tail(name, (number + mpmath.mpf("0.5")) / SCALE) <= (bits + mpmath.mpf("0.5")) / 2**64 <= above


@pytest.mark.parametrize("name", LAWS)
def test_further_bits_decide_where_the_first_64_do_not(name):
    with mpmath.workdps(60):
        exact = tail(name, (700_000 + mpmath.mpf("0.5")) / SCALE) * 2**64
        first, rest = int(mpmath.floor(exact)), int(mpmath.floor((exact - mpmath.floor(exact)) * 2**64))
    assert drawn(name, [first], further=rest - 1) == [700_001]
    assert drawn(name, [first], further=rest + 1) == [700_000]


@pytest.mark.parametrize("name", LAWS)
def test_inversion_in_float64_is_closer_than_doubt_begins(name):
    """Off by less than 2⁻⁴⁰, a hundredth of what is allowed, over the whole range that is not looked at again."""
    tails = np.concatenate([np.geomspace(2.0**-24, 0.5, 1500), 0.5 - np.geomspace(1e-12, 0.4, 500)])
    found = LAWS[name].inverse(torch.from_numpy(tails)).tolist()
    with mpmath.workdps(40):
        for probability, number in zip(tails.tolist(), found, strict=True):
            slope = number if name == "laplace" else mpmath.npdf(number)
            slope = tail(name, mpmath.mpf(number)) if name == "laplace" else slope
            assert abs((tail(name, mpmath.mpf(number)) - probability) / slope) < 2.0**-40


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("scale", [0.7, 3.0])
def test_frequencies_are_the_exact_probabilities(name, scale):
    count = 200_000
    numbers = NoiseStream(b"key").whole("p", "n", (count,), scale, LAWS[name]).numpy()
    most = int(4 * scale)
    above = [float(tail(name, (k - mpmath.mpf("0.5")) / scale)) for k in range(1, most + 2)]
    cells = -np.diff(above)
    expected = np.concatenate([[above[-1]], cells[::-1], [1 - 2 * above[0]], cells, [above[-1]]]) * count
    found = np.bincount(np.clip(numbers, -most - 1, most + 1) + most + 1, minlength=2 * most + 3)
    assert stats.chisquare(found, expected * count / expected.sum()).pvalue > 1e-3


def test_few_numbers_need_more_bits():
    words = np.random.default_rng(1).integers(0, 2**64, 200_000, dtype=np.uint64)
    _, doubtful = rounded_numbers(words, lambda _: 0, 2.0**20, GAUSSIAN)
    assert 10 < len(doubtful) < 120  # 2.4 in 10,000


@pytest.mark.parametrize("norm", ["l1", "l2"])
@given(st.integers(0, 10**6), st.floats(-30, 30), st.floats(1e-6, 1e6), st.floats(0, 1e4))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_whole_numbers_keep_to_the_bound_exactly(norm, seed, power, bound, multiplier):
    """Python's integers say so, of any size of numbers and of noise; each lies within a step of the scaled number."""
    draws = np.random.default_rng(seed)
    vector = torch.tensor(draws.normal(size=300) * 10.0**power, dtype=torch.float32)
    grid = grid_of(bound, multiplier * bound)
    whole = integer_vector(vector, bound, grid, norm).tolist()
    size = sum(map(abs, whole)) ** 2 if norm == "l1" else sum(number * number for number in whole)
    assert mpmath.mpf(size) * mpmath.mpf(grid) ** 2 <= mpmath.mpf(bound) ** 2
    wide = vector.double()
    factor = min(1.0, bound / max(float(wide.norm(p=int(norm[1]))), 1e-300))
    assert (np.abs((wide * factor).numpy() - grid * np.array(whole)) < grid + 3e-9 * bound).all()


def test_vectors_without_a_finite_norm_count_as_zero():
    grid = grid_of(10.0, 1.0)
    for number in (float("nan"), float("inf"), -float("inf")):
        assert not integer_vector(torch.tensor([1.0, number]), 10.0, grid).any()
    assert integer_vector(torch.tensor([1.0, 0.0]), 10.0, grid).tolist() == [1 / grid, 0]
    smallest = grid_of(1e-6, 0.0)
    size = float(integer_vector(torch.tensor([2.8e38]), 1e-6, smallest)) * smallest
    assert 0.99 < size * 1e6 <= 1


@given(st.integers(0, 10**6), st.permutations(range(12)), st.integers(1, 12), st.integers(0, 11))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_without_a_unit_a_sum_differs_by_its_vector(seed, order, group, emptied):
    """In any order, in groups of any size."""
    draws = torch.Generator().manual_seed(seed)
    grid = grid_of(1.0, 1.0)
    units = [integer_vector(3 * torch.randn(50, generator=draws), 1.0, grid) for _ in range(12)]

    def total(chosen: list[int]) -> torch.Tensor:
        groups = [chosen[start : start + group] for start in range(0, len(chosen), group)]
        return sum((torch.stack([units[n] for n in each]).sum(0) for each in groups), torch.zeros(50).long())

    assert torch.equal(total(list(range(12))) - total([n for n in order if n != emptied]), units[emptied])


@pytest.mark.parametrize("name", LAWS)
def test_what_leaves_is_a_rounding_of_sum_and_noise(name):
    """Sums that are a whole number of steps apart get outputs that are, so low bits tell nothing of them."""
    grid, stream = grid_of(1.0, 0.3), NoiseStream(b"key")
    norm = "l1" if name == "laplace" else "l2"
    one, other = (
        with_noise(whole_tensors({"a": tensor}, 1.0, grid, norm), stream, 0.3, grid, name)["a"]
        for tensor in (torch.linspace(-1, 1, 7), torch.linspace(2, -3, 7) / 7)
    )
    for found in (one, other, one - other):
        assert torch.equal((found / grid).round(), found / grid)
    assert isinstance(LAWS[name], Law)
