"""The codec `topk` against NumPy; with feedback, what was sent and what is kept is what changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.communication.messages import MessageRefused
from silotune.communication.uplink import make_pipeline
from silotune.communication.uplink.sparse import POSITIONS, TopK, TopKOptions
from silotune.config.uplink import UplinkConfig

SHAPES = [(7, 5), (16,), (), (3, 4, 2), (0, 3)]


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fraction", [0.01, 0.25, 1.0])
def test_the_largest_numbers_come_back_and_the_others_are_zero(shape, fraction):
    codec, tensor = TopK(TopKOptions(fraction=fraction)), drawn(shape)
    entry = codec.encode(tensor)
    layout = codec.layout(shape)
    assert {name: (tuple(value.shape), value.dtype) for name, value in entry.items()} == layout
    flat = tensor.numpy().reshape(-1)
    count = int(np.ceil(fraction * flat.size - 1e-9))
    expected = np.zeros_like(flat)
    largest = np.argsort(-np.abs(flat))[:count]
    expected[largest] = flat[largest].astype(np.float32)
    found = codec.decode(entry, shape)
    assert tuple(found.shape) == shape
    assert np.array_equal(found.numpy().reshape(-1), expected.astype(np.float32))


@pytest.mark.parametrize(("values", "bits"), [("float32", 32), ("fp16", 16), ("int8", 8), ("int4", 4)])
def test_shorter_values(values, bits):
    codec, tensor = TopK(TopKOptions(fraction=0.5, values=values)), drawn((20, 30))
    entry = codec.encode(tensor)
    assert entry[""].nbytes == 300 * bits // 8
    found = codec.decode(entry, (20, 30))
    chosen = found != 0
    assert 280 <= chosen.sum() <= 300  # int4 rounds some to 0
    largest = float(tensor.abs().max())
    assert (found - tensor)[chosen].abs().max() <= {32: 1e-6, 16: 2e-3, 8: largest / 254, 4: largest / 14}[bits] + 1e-6


def test_of_equal_magnitudes_the_first_are_sent():
    codec = TopK(TopKOptions(fraction=0.5))
    assert codec.encode(torch.tensor([1.0, -1.0, 1.0, -1.0]))[POSITIONS].tolist() == [0, 1]


def test_nan_stays_nan_so_that_the_change_is_refused():
    tensor = drawn((100,))
    tensor[50] = torch.nan
    assert TopK().encode(tensor)[""].isnan().all()


@pytest.mark.parametrize("positions", [[0, 0], [5, 2], [-1, 3], [0, 10]])
def test_positions_that_no_silo_writes_are_refused(positions):
    codec = TopK(TopKOptions(fraction=0.2))
    entry = codec.encode(drawn((10,))) | {POSITIONS: torch.tensor(positions, dtype=torch.int32)}
    with pytest.raises(ValueError, match="positions that do not ascend within its 10 numbers"):
        codec.decode(entry, (10,))
    pipeline = make_pipeline(UplinkConfig(name="topk", fraction=0.2))
    written = {"global/w" + suffix: tensor for suffix, tensor in entry.items()}
    with pytest.raises(MessageRefused, match="'global/w' holds positions"):
        pipeline.read(written, {"global/w": torch.zeros(10)}, "silo", 1)
