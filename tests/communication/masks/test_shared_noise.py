"""The sum of silos' shares has the law that the proof says, and costs what the accountant says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from scipy.special import ndtr
from scipy.stats import chisquare

from silotune.communication.masks.fixed_point import MOST_SILOS, MOST_WEIGHT
from silotune.communication.masks.shared_noise import SharedNoise, common_multiplier
from silotune.communication.privacy.noise import NoiseStream, with_integer_noise
from silotune.communication.privacy.row_accountant import Costs, RowFilters, noise_multiplier, plan_epsilon
from silotune.errors import InputError, SilotuneError


def share_law(scale: float, farthest: int) -> np.ndarray:
    """Return the probabilities of round(X) for −farthest to farthest."""
    places = np.arange(-farthest, farthest + 1)
    return ndtr((places + 0.5) / scale) - ndtr((places - 0.5) / scale)


def sum_law(shares: int, scale: float, farthest: int) -> np.ndarray:
    law = found = share_law(scale, farthest)
    for _ in range(shares - 1):
        found = np.convolve(found, law)
    return found


def spline_law(shares: int, scale: float, places: np.ndarray) -> np.ndarray:
    """Return the law of a B-spline's choice around one Gaussian number of the whole deviation, by quadrature."""
    spline = BSpline.basis_element(np.arange(shares + 1) - shares / 2, extrapolate=False)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    offsets = (np.arange(shares)[:, None] - shares / 2 + (nodes + 1) / 2).ravel()
    mass = np.tile(weights / 2, shares) * spline(offsets)
    deviation = math.sqrt(shares) * scale
    density = np.exp(-(((places[:, None] - offsets) / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))
    return density @ mass


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
@pytest.mark.parametrize(("scale", "distance"), [(2.0, 1e-14), (1.2, 1e-4), (0.3, 1.0)])
def test_the_law_of_a_sum(shares, scale, distance):
    """The distance falls as e^(−π²·scale²); with a coarse grid the sum of shares has another law."""
    farthest = 40
    places = np.arange(-farthest * shares, farthest * shares + 1)
    found = np.abs(sum_law(shares, scale, farthest) - spline_law(shares, scale, places)).sum()
    assert found < max(distance, 1e-13)
    assert shares == 1 or scale > 1 or found > 1e-3
    total = sum(spline_law(shares, scale, np.array([z - 0.3]))[0] for z in places)
    assert total == pytest.approx(1, abs=1e-12) or scale < 1


def test_drawn_shares_have_this_law():
    """Of three silos with a coarse grid, number by number; and with the real grid their deviation is σ."""
    silos = [NoiseStream(bytes([index])) for index in range(3)]
    none = {"part/x": torch.zeros(200_000, dtype=torch.int64)}

    def total(scale: float, grid: float) -> np.ndarray:
        return sum(with_integer_noise(none, silo, scale, grid, "gaussian")["part/x"] for silo in silos).numpy()

    law = sum_law(3, 2.0, 40)
    counts, first = np.bincount(total(2.0, 1.0) + 120, minlength=241), 120 - 11
    tails = lambda each: np.concatenate([[each[:first].sum()], each[first:-first], [each[-first:].sum()]])  # noqa: E731
    assert chisquare(tails(counts), tails(law) * counts.sum() / law.sum()).pvalue > 1e-3
    noise = SharedNoise(1.7, 0.3, 0.5, least=4, colluders=1)
    deviation = total(noise.silo_deviation, noise.grid).std() * noise.grid
    assert deviation == pytest.approx(1.7 * 0.3, rel=4 / math.sqrt(2 * 200_000))


def hockey_stick(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum())


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 1), (0.4, 2)])
def test_two_shares_cost_what_the_accountant_says(rate, steps):
    """By the probabilities of all outcomes of steps in which a unit is there or not, at a grid of six steps."""
    size, farthest = 6, 60
    law = sum_law(2, size / math.sqrt(2), farthest)
    without, within = np.pad(law, (0, size)), np.pad(law, (size, 0))
    drawn = (1 - rate) * without + rate * within
    if steps == 2:
        without, drawn = np.outer(without, without), np.outer(drawn, drawn)
    delta = 1e-5
    epsilon = plan_epsilon(((1.0, rate, steps),), delta)
    found = max(hockey_stick(drawn, without, epsilon), hockey_stick(without, drawn, epsilon))
    assert 0.85 * delta < found <= delta
    one = sum_law(1, size / math.sqrt(2), farthest)
    assert hockey_stick(np.pad(one, (size, 0)), np.pad(one, (0, size)), epsilon) > 10 * delta, "one share is too little"


@pytest.mark.parametrize(("least", "colluders", "honest"), [(3, 1, 2), (4, 1, 3), (4, 0, 3), (6, 3, 3), (8, 1, 7)])
def test_how_many_shares_are_counted_on(least, colluders, honest):
    noise = SharedNoise(2.0, 1.0, 0.5, least, colluders)
    assert noise.honest == honest
    assert noise.silo_deviation * math.sqrt(honest) == pytest.approx(2.0)
    assert SharedNoise.read(noise.text) == noise


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(8, 0.25, 120), (1, 0.25, 120), (1, 0.016, 16), (8, 1, 20)])
def test_a_ledger_allows_the_common_noise_as_it_is(epsilon, rate, steps):
    """Though the run may use the whole budget: otherwise silos would add different noise."""
    multiplier = common_multiplier(epsilon, 1e-5, rate, steps)
    filters = RowFilters.of(epsilon, 1e-5)
    assert filters.least_scale(Costs([0.0] * 8, 0.0), ((multiplier, rate, steps),)) == 1.0
    assert multiplier < 1.05 * noise_multiplier(epsilon, 1e-5, rate, steps)
    assert multiplier == round(multiplier * 1024) / 1024


@pytest.mark.parametrize("multiplier", [0.0, 1e-6, 0.3, 1.0, 17.3])
@pytest.mark.parametrize("clip", [1e-6, 0.3, 1e6])
def test_no_sum_wraps_around(multiplier, clip):
    noise = SharedNoise(multiplier, clip, 0.5, MOST_SILOS, 1)
    assert MOST_SILOS * MOST_WEIGHT * clip / noise.grid < 2**56
    assert 16 * noise.silo_deviation / noise.grid < 2**24
    assert multiplier < 0.01 or noise.silo_deviation / noise.grid > 2**16


def test_a_mean_gradient_of_summands():
    noise, sent = SharedNoise(1.0, 1.0, 0.25, 3, 1), {"b/x": torch.zeros(2), "a/y": torch.zeros(1, 2)}
    sums = {"b/x": torch.tensor([3, -4]) * 2**20}
    summands = [noise.summand(units, sums, sent) for units in (8, 12)]
    assert summands[0].tolist() == [8, 0, 0, 3 * 2**20, -4 * 2**20]
    gradient, units = noise.mean_gradient(summands[0] + summands[1], sent)
    assert units == 20
    torch.testing.assert_close(gradient["b/x"], torch.tensor([6.0, -8.0], dtype=torch.float64) * 2**20 * noise.grid / 5)
    assert gradient["a/y"].tolist() == [[0, 0]]


@pytest.mark.parametrize("total", [[0, 1], [-3, 1], [2**26, 1], [20, 2**40]])
def test_what_no_summands_add_up_to(total):
    with pytest.raises(SilotuneError, match="a silo did not keep to the protocol"):
        SharedNoise(1.0, 1.0, 0.25, 3, 1).mean_gradient(torch.tensor(total), {"a/x": torch.zeros(1)})


def test_summands_that_are_refused():
    noise, sums = SharedNoise(1.0, 1.0, 0.25, 3, 1), {"a/x": torch.zeros(1, dtype=torch.int64)}
    for units, sent in ((2**20 + 1, sums), (0, sums), (5, {})):
        with pytest.raises(SilotuneError):
            noise.summand(units, sums, sent)
    for text in ("", "3", '{"multiplier": 1}'):
        with pytest.raises(InputError, match=r"privacy\.shares"):
            SharedNoise.read(text)
