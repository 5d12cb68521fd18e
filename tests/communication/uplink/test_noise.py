"""Clipping and noise: the bound, the sensitivity that follows from it, and the distribution of what is added."""

from __future__ import annotations

import hashlib
import hmac
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from silotune.communication.privacy.noise import NoiseStream, noise_stream_for, read_secret, secret_seed
from silotune.errors import InputError
from tests.support.uplink_changes import change, flat, pipeline

ORDER = {"l1": 1, "l2": 2}
MANY = {"global/w": (300, 200), "global/b": (40_000,)}
COUNT = 100_000


@pytest.mark.parametrize("norm", ORDER)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_change_is_scaled_down_to_the_bound_and_never_above(norm, seed, spread, bound):
    before = change(seed, spread)
    after = pipeline("clip", clip=bound, norm=norm).steps[0](before, None)
    length, left = (np.linalg.norm(flat(found), ORDER[norm]) for found in (before, after))
    if length <= bound:
        np.testing.assert_array_equal(flat(after), flat(before))
    else:
        assert left <= bound  # without any tolerance
        np.testing.assert_allclose(left, bound, rtol=1e-9)
        np.testing.assert_allclose(flat(after), flat(before) * bound / length, rtol=1e-9)


def test_the_bound_holds_in_the_message_as_well():
    """Rounded to float32, as it is sent, within the rounding of that."""
    for norm in ORDER:
        sent, _ = pipeline("clip", clip=0.25, norm=norm).send(change(3), {}, "alpha", 1)
        assert np.linalg.norm(flat(sent), ORDER[norm]) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("norm", ORDER)
def test_the_sensitivity_is_twice_the_bound(norm):
    """Any two clipped changes are at most 2C apart, and two opposite ones are exactly that."""
    clip = pipeline("clip", clip=0.5, norm=norm).steps[0]
    clipped = [flat(clip(change(seed, 10.0**power), None)) for seed in range(20) for power in (-3, 0, 3)]
    apart = [np.linalg.norm(one - other, ORDER[norm]) for one in clipped for other in clipped]
    assert max(apart) <= 2 * 0.5
    one = change(1)
    opposite = {name: -tensor for name, tensor in one.items()}
    found = np.linalg.norm(flat(clip(one, None)) - flat(clip(opposite, None)), ORDER[norm])
    assert found == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize(("clip", "epsilon"), [(1.0, 8.0), (0.25, 0.5)])
def test_laplace_noise_loses_at_most_epsilon(clip, epsilon):
    """The log ratio of the densities under any two silos, at the worst answer, is `‖Δ − Δ'‖₁ / b`."""
    made = pipeline("clip", "laplace", clip=clip, epsilon=epsilon)
    one, other = (flat(made.steps[0](change(seed, 5.0), None)) for seed in (1, 2))
    assert np.abs(one - other).sum() / made.steps[1].scale <= epsilon
    opposite = -one
    assert np.abs(one - opposite).sum() / made.steps[1].scale == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (8.0, 1e-3)])
def test_gaussian_noise_is_what_balle_and_wang_ask_for(epsilon, delta):
    """Their Theorem 8: with a = Δ/(2σ), b = εσ/Δ, Φ(a − b) − e^ε·Φ(−a − b) = δ."""
    deviation = pipeline("clip", "gaussian", clip=0.5, epsilon=epsilon, delta=delta).steps[1].deviation
    a, b = 2 * 0.5 / (2 * deviation), epsilon * deviation / (2 * 0.5)
    found = stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b)
    assert found == pytest.approx(delta, rel=1e-5)


DISTRIBUTIONS = {
    "laplace": ({"clip": 0.5, "epsilon": 4.0}, stats.laplace(scale=2 * 0.5 / 4.0)),
    "gaussian": ({"clip": 0.5, "epsilon": 4.0, "delta": 1e-5}, None),
}

BARE = {"laplace": stats.laplace(scale=0.25), "gaussian": stats.norm(scale=0.25)}


@pytest.mark.parametrize("name", BARE)
def test_noise_without_a_clip_is_added_to_the_whole_change(name):
    made, given = pipeline(name, scale=0.25), change(0, 1000.0, MANY)
    noise = flat(made.send(given, {}, "alpha", 1)[0]) - flat(given)
    assert stats.kstest(noise, BARE[name].cdf).pvalue > 1e-3
    infinite = {"global/a": torch.tensor([1.0, torch.inf])}
    assert made.send(infinite, {}, "alpha", 1)[0]["global/a"].isinf().tolist() == [False, True]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_is_added_has_the_stated_distribution(name):
    options, expected = DISTRIBUTIONS[name]
    made = pipeline("clip", name, **options)
    if expected is None:
        expected = stats.norm(scale=made.steps[1].deviation)
    sent, _ = made.send(change(0, 1.0, MANY), {}, "alpha", 1)
    noise = flat(sent) - flat(made.steps[0](change(0, 1.0, MANY), None))
    assert len(noise) == COUNT
    assert stats.kstest(noise, expected.cdf).pvalue > 1e-3
    assert abs(noise.mean()) < 4 * expected.std() / math.sqrt(COUNT)
    fourth = expected.stats(moments="k") + 3
    assert noise.var() / expected.var() == pytest.approx(1, abs=4 * math.sqrt((fourth - 1) / COUNT))
    absolute = np.abs(noise).mean()  # of Laplace numbers the scale itself
    spread = math.sqrt(expected.var() - expected.expect(np.abs) ** 2)
    assert absolute == pytest.approx(expected.expect(np.abs), abs=4 * spread / math.sqrt(COUNT))


def test_every_coordinate_tensor_silo_round_and_seed_has_noise_of_its_own():
    def noise(silo: str = "alpha", number: int = 1, seed: int = 1) -> np.ndarray:
        shapes = {"global/a": (20_000,), "global/b": (20_000,)}
        nothing = change(0, 0.0, shapes)
        return flat(pipeline("clip", "laplace", seed=seed).send(nothing, {}, silo, number)[0])

    base = noise()
    halves = np.split(base, 2)
    others = [noise(silo="beta"), noise(number=2), noise(seed=2)]
    pairs = [(base, other) for other in others] + [tuple(halves), (base[1:], base[:-1]), (base[2:], base[:-2])]
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / math.sqrt(len(one))
    np.testing.assert_array_equal(base, noise())


def test_uniform_numbers_fill_the_open_interval_evenly():
    found = noise_stream_for(1, None, "alpha", 1, {}, "").uniform("p", "n", (COUNT,)).numpy()
    assert found.min() > 0
    assert found.max() < 1
    assert stats.kstest(found, "uniform").pvalue > 1e-3


# -- a silo's own secret ----------------------------------------------------------------------------------------------


def noise_of(sent: dict, before: dict, made) -> np.ndarray:
    return flat(sent) - flat(made.steps[0](before, None))


def test_a_secret_hides_the_noise_from_whoever_knows_the_seed():
    before = change(0, 0.01)
    known = pipeline("clip", "laplace").send(before, {}, "alpha", 1)[0]
    made = pipeline("clip", "laplace", secret=b"s" * 32)
    hidden = made.send(before, {}, "alpha", 1)[0]
    other = pipeline("clip", "laplace", secret=b"t" * 32).send(before, {}, "alpha", 1)[0]
    assert not np.isclose(flat(known), flat(hidden)).any()
    assert not np.isclose(flat(other), flat(hidden)).any()
    np.testing.assert_array_equal(
        flat(made.send(before, {}, "alpha", 1)[0]), flat(hidden)
    )  # sent twice, it says no more


def test_two_changes_never_wear_the_same_noise_under_a_secret():
    """Else a coordinator that repeats a round with other parts could take the difference."""
    before = change(0, 0.01)
    moved = {name: tensor + 1e-9 for name, tensor in before.items()}
    for secret, same in ((None, True), (b"s" * 32, False)):
        made = pipeline("clip", "laplace", secret=secret)
        one, other = (noise_of(made.send(c, {}, "alpha", 1)[0], c, made) for c in (before, moved))
        assert np.allclose(one, other, atol=1e-6) is same


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_one_change_never_wears_the_same_noise_at_two_strengths_under_a_secret(noise):
    """Else two runs that differ in ε alone, (4 · one − other) / 3, would lay the change bare."""
    before = change(0, 0.01)
    for secret, same in ((None, True), (b"s" * 32, False)):
        noises = []
        for epsilon in (8.0, 2.0):
            made = pipeline("clip", noise, secret=secret, epsilon=epsilon)
            noises.append(noise_of(made.send(before, {}, "alpha", 1)[0], before, made))
        assert bool(np.corrcoef(*noises)[0, 1] > 0.999) is same


def test_uniform_numbers_never_reach_an_end(monkeypatch):
    class Stream:
        def __init__(self, byte: bytes) -> None:
            self.byte = byte

        def digest(self, size: int) -> bytes:
            return self.byte * size

    for byte, found in ((b"\xff", 1 - 2**-53), (b"\x00", 2**-53)):
        hash_function = "silotune.communication.privacy.noise.hashlib.shake_256"
        monkeypatch.setattr(hash_function, lambda _, byte=byte: Stream(byte))
        assert NoiseStream(b"key").uniform("p", "n", (3,)).tolist() == [found] * 3


def test_a_secret_seed_is_63_bits_of_an_hmac():
    code = hmac.new(b"secret", b"choose\x1f7", hashlib.sha256).hexdigest()
    assert secret_seed(7, b"secret") == int(code[:16], 16) // 2


def test_a_secret_is_read_from_a_file(tmp_path):
    assert read_secret(None) is None
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    assert read_secret(str(tmp_path / "key")) == b"0123456789abcdef"
    (tmp_path / "short").write_bytes(b"0123456789abcde")
    with pytest.raises(InputError, match="15 bytes are no secret; allowed: 16 or more"):
        read_secret(str(tmp_path / "short"))
    with pytest.raises(InputError, match="cannot be read"):
        read_secret(str(tmp_path / "absent"))
