"""Codecs: error bounds, unbiasedness and feedback against NumPy, and sizes of real messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silotune.communication.messages import Expected, change_message, check_tensors, pack
from silotune.communication.uplink import BUILT_IN_CODECS
from silotune.communication.uplink.codecs import Float16, UniformQuantizer, channels, pack4, unpack4
from silotune.communication.uplink.pipeline import UplinkPipeline
from silotune.errors import InputError
from tests.support.uplink_changes import SHAPES, change, flat, pipeline, zeros

MOST = {"int8": 127, "int4": 7}
shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
seeds = st.integers(0, 10**6)
calm = {"max_examples": 60, "deadline": None, "derandomize": True}


def by_channel(values: np.ndarray) -> np.ndarray:
    """The largest magnitude that each number shares a scale with, of the values' shape."""
    if values.ndim < 2:
        return np.full(values.shape, np.abs(values).max())
    last = values.shape[-1] < values.shape[0]
    axes = tuple(range(values.ndim - 1)) if last else tuple(range(1, values.ndim))
    return np.broadcast_to(np.abs(values).max(axis=axes, keepdims=True), values.shape)


@pytest.mark.parametrize("name", MOST)
@given(shapes, seeds, st.floats(1e-9, 1e9))
@settings(**calm)
def test_nothing_moves_by_more_than_half_a_step(name, shape, seed, spread):
    values = spread * np.random.default_rng(seed).normal(size=shape)
    codec = UniformQuantizer(MOST[name])
    written = codec.encode(torch.tensor(values))
    found = codec.decode(written, shape).numpy()
    assert found.shape == shape
    step = by_channel(values) / MOST[name]
    assert (np.abs(found - values) <= step / 2 * (1 + 1e-6) + 1e-30).all()
    assert {key: (tuple(t.shape), t.dtype) for key, t in written.items()} == codec.layout(shape)


@given(shapes, seeds)
@settings(**calm)
def test_int8_codes_are_numpys(shape, seed):
    values = np.random.default_rng(seed).normal(size=shape)
    scale = by_channel(values) / 127
    codes = UniformQuantizer(127).encode(torch.tensor(values))[""].numpy()
    expected = values / scale
    assert (np.abs(codes - expected) <= 0.5 + 1e-4).all()  # the scale is float32 in the message
    assert np.abs(codes).max() == 127


@pytest.mark.parametrize("most", MOST.values())
def test_what_is_on_the_grid_comes_back_exactly(most):
    codes = torch.arange(-most, most + 1).float()
    values = torch.stack([codes, codes * 0.25, torch.zeros_like(codes), codes * -2])
    codec = UniformQuantizer(most)
    assert torch.equal(codec.decode(codec.encode(values), (4, 2 * most + 1)), values)


def test_scales_stand_for_the_shorter_outer_axis():
    assert [channels(s) for s in ((), (9,), (3, 8), (8, 3), (4, 5, 6), (6, 5, 4))] == [1, 1, 3, 3, 4, 4]
    values = torch.tensor([[1.0, 100.0], [2.0, 200.0], [-4.0, 50.0]])  # columns of different size
    codec = UniformQuantizer(127)
    written = codec.encode(values)
    torch.testing.assert_close(written[":scale"], torch.tensor([4 / 127, 200 / 127]))
    assert (codec.decode(written, (3, 2)) - values).abs()[:, 0].max() <= 2 / 127


def test_two_codes_share_a_byte_the_first_in_the_low_half():
    packed = pack4(torch.tensor([-7, 7, 0, 3, -1], dtype=torch.int8))
    assert packed.tolist() == [1 | 15 << 4, 8 | 11 << 4, 7 | 8 << 4]
    assert unpack4(packed, 5).tolist() == [-7, 7, 0, 3, -1]


@given(st.lists(st.integers(-7, 7), max_size=40))
@settings(**calm)
def test_packing_is_undone(codes):
    packed = pack4(torch.tensor(codes, dtype=torch.int8))
    assert len(packed) == math.ceil(len(codes) / 2)
    assert unpack4(packed, len(codes)).tolist() == codes


@given(shapes, seeds, st.floats(1e-6, 1e3))
@settings(**calm)
def test_half_precision_is_numpys(shape, seed, spread):
    values = spread * np.random.default_rng(seed).normal(size=shape)
    codec = Float16()
    found = codec.decode(codec.encode(torch.tensor(values)), shape).numpy()
    np.testing.assert_array_equal(found, values.astype(np.float16).astype(np.float32))


def test_numbers_beyond_half_precision_become_its_largest():
    codec = Float16()
    found = codec.decode(codec.encode(torch.tensor([1e6, -1e6, 1.0])), (3,))
    assert found.tolist() == [65504.0, -65504.0, 1.0]


@pytest.mark.parametrize("name", MOST)
def test_rounding_by_chance_is_right_on_average(name):
    """Each number is the code below or above; over many rounds the mean is the number."""
    shape = {"global/w": (6, 4)}
    values = change(4, 1.0, shape)
    made = pipeline(name, rounding="stochastic", feedback=False)
    rounds = 1000
    sent = (made.send(values, {}, "a", number)[0] for number in range(rounds))
    found = np.stack([flat(made.read(written, zeros(shape), "a", number)) for number, written in enumerate(sent)])
    step = by_channel(values["global/w"].numpy()).ravel() / MOST[name]
    assert (np.abs(found - flat(values)) <= step * (1 + 1e-6)).all()
    assert (np.abs(found.mean(0) - flat(values)) <= 4.5 * step / 2 / math.sqrt(rounds) + 1e-6 * step).all()
    nearest = pipeline(name, feedback=False)
    once = flat(nearest.read(nearest.send(values, {}, "a", 1)[0], zeros(shape), "a", 1))
    assert np.abs(once - flat(values)).max() > 4.5 * step.max() / 2 / math.sqrt(rounds)  # rounding to nearest is not


@pytest.mark.parametrize("name", BUILT_IN_CODECS)
@pytest.mark.parametrize("rounding", [None, "stochastic"])
def test_feedback_makes_up_for_what_was_rounded_away(name, rounding):
    """Σ sent = Σ changes − what is still kept; without feedback errors add up."""
    if name not in MOST and rounding:
        return
    options = {} if rounding is None else {"rounding": rounding}
    made, without = pipeline(name, **options), pipeline(name, feedback=False, **options)
    memory: dict[str, torch.Tensor] = {}
    wanted, sent, plain = (np.zeros(len(flat(zeros()))) for _ in range(3))
    for number in range(1, 31):
        step = change(5, 1e-3)  # the same each time, as a steady drift is: rounding always errs the same way
        step = {key: tensor + change(number, 1e-5)[key] for key, tensor in step.items()}
        written, kept = made.send(step, memory, "alpha", number)
        memory = {"previous/x": torch.ones(1)} | kept
        wanted += flat(step)
        sent += flat(made.read(written, zeros(), "alpha", number))
        plain += flat(without.read(without.send(step, {}, "alpha", number)[0], zeros(), "alpha", number))
        left = flat({key.removeprefix("uplink/"): tensor for key, tensor in kept.items()})
        np.testing.assert_allclose(sent, wanted - left, rtol=0, atol=1e-8)
    if rounding is None and name in MOST:
        assert np.abs(sent - wanted).max() < np.abs(plain - wanted).max() / 5
    assert without.send(change(), {}, "a", 1)[1] == {}


@pytest.mark.parametrize("name", BUILT_IN_CODECS)
@given(shapes, seeds)
@settings(**calm)
def test_a_codec_writes_its_layout_and_reads_float32(name, shape, seed):
    codec = pipeline(name).codec
    values = torch.tensor(np.random.default_rng(seed).normal(size=shape))
    written = codec.encode(values, torch.full(shape, 0.5, dtype=torch.float64) if codec.draws else None)
    assert {key: (tuple(t.shape), t.dtype) for key, t in written.items()} == codec.layout(shape)
    decoded = codec.decode(written, shape)
    assert (tuple(decoded.shape), decoded.dtype) == (shape, torch.float32)


class Wide(Float16):
    """Writes what it says it would shorten."""

    def encode(self, tensor, uniform=None):
        return {name: value.float() for name, value in super().encode(tensor, uniform).items()}


def test_a_codec_that_writes_another_layout_is_refused_where_it_encodes():
    """Not by a coordinator in every round."""
    with pytest.raises(InputError, match=r"codec Wide: encodes 'global/a' as .*float32.*; its layout is .*float16"):
        UplinkPipeline(("wide",), codec=Wide()).send({"global/a": torch.ones(2, 3)}, {}, "north", 1)


def test_feedback_comes_after_the_noise():
    """What a silo keeps is what the codec took from the noised change: it says nothing that was not sent."""
    made, plain = pipeline("clip", "laplace", "int8"), pipeline("clip", "laplace")
    noised = plain.send(change(), {}, "alpha", 1)[0]
    written, kept = made.send(change(), {}, "alpha", 1)
    found = made.read(written, zeros(), "alpha", 1)
    for name, tensor in noised.items():
        torch.testing.assert_close(kept[f"uplink/{name}"], tensor - found[name], rtol=0, atol=1e-6)


def test_a_change_of_nothing_is_nothing():
    for name in BUILT_IN_CODECS:
        made = pipeline(name)
        written, kept = made.send(change(0, 0.0), {}, "alpha", 1)
        assert all(not tensor.any() for tensor in made.read(written, zeros(), "alpha", 1).values())
        assert all(not tensor.any() for tensor in kept.values())
    tiny = pipeline("int8").send(change(0, 1e-44), {}, "alpha", 1)[0]  # no float32 scale is as small
    check_tensors(tiny, pipeline("int8").expected(Expected.like(zeros())))


@pytest.mark.parametrize(("name", "ratio"), [("fp16", 1 / 2), ("int8", 1 / 4), ("int4", 1 / 8)])
@pytest.mark.parametrize(
    "parts",
    [
        {"global/prompt": (20, 768)},
        {f"global/{n}.{m}": s for n in range(24) for m, s in (("down", (16, 384)), ("up", (384, 16)))},
        {f"global/{n}.{m}": s for n in range(24) for m, s in (("A", (8, 768)), ("B", (768, 8)))},
    ],
    ids=["prompt", "bottleneck", "lora"],
)
def test_messages_are_smaller_by_as_much(name, ratio, parts):
    values = change(1, 1.0, parts)
    whole = pack({key: tensor.float() for key, tensor in values.items()}, {"round": 1, "rows": 9, "silo": "alpha"})
    made = pipeline(name)
    sent = change_message(made.send(values, {}, "alpha", 1)[0], made.label, 1, "alpha", 9)
    numbers = sum(math.prod(shape) for shape in parts.values())
    scales = 0 if name == "fp16" else 4 * sum(min(shape[0], shape[-1]) for shape in parts.values())
    header = int.from_bytes(sent[:8], "little")
    assert len(sent) == 8 + header + numbers * 4 * ratio + scales
    assert ratio <= len(sent) / len(whole) < 1.16 * ratio


def test_the_order_of_a_states_tensors_changes_nothing():
    for names in (("int4",), ("clip", "laplace", "int8")):
        made = pipeline(*names)
        turned = dict(reversed(change().items()))
        one, other = (made.send(found, {}, "alpha", 1)[0] for found in (change(), turned))
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert set(SHAPES) == set(change())
