"""What arrives by an uplink is refused unless a silo's uplink can have written it; nothing else is ever raised."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load

from silotune.aggregation import by_samples
from silotune.communication.messages import MessageRefused, change_message
from silotune.communication.uplink import BUILT_IN_CODECS
from silotune.training.coordinator import Coordinator
from tests.support.small_messages import GOOD, ROUND, ROWS, SHARED, SILO, good_fields, good_tensors, packed
from tests.support.uplink_changes import pipeline

CHAINS = (("clip",), ("clip", "laplace"), *((name,) for name in BUILT_IN_CODECS), ("clip", "laplace", "int8"))
Tensors = dict[str, torch.Tensor]


def coordinator(names: tuple[str, ...]) -> Coordinator:
    return Coordinator(SHARED, by_samples, uplink=pipeline(*names))


def good(names: tuple[str, ...]) -> tuple[Tensors, dict[str, object]]:
    tensors, _ = pipeline(*names).send(good_tensors(), {}, SILO, ROUND)
    return tensors, good_fields() | {"uplink": ",".join(names)}


def refused(names: tuple[str, ...], message: bytes) -> str:
    with pytest.raises(MessageRefused) as caught:
        coordinator(names).receive(ROUND, SILO, message)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("names", CHAINS, ids=",".join)
def test_a_good_change_is_added_to_what_was_broadcast(names):
    tensors, _ = good(names)
    message = change_message(tensors, ",".join(names), ROUND, SILO, ROWS)
    update = coordinator(names).receive(ROUND, SILO, message)
    assert (update.silo, update.rows) == (SILO, ROWS)
    zeros = {key: torch.zeros_like(tensor) for key, tensor in good_tensors().items()}
    found = pipeline(*names).read(tensors, zeros, SILO, ROUND)
    for part, inner in SHARED.items():
        for name, before in inner.items():
            expected = before.numpy() + found[f"{part}/{name}"].numpy()
            np.testing.assert_allclose(update.tensors[f"{part}/{name}"].numpy(), expected, atol=1e-6)
            assert update.tensors[f"{part}/{name}"].dtype is torch.float32


@pytest.mark.parametrize("names", CHAINS, ids=",".join)
def test_parts_are_not_taken_for_a_change_nor_a_change_for_parts(names):
    refused(names, GOOD)
    refused(names, packed(good_tensors(), good_fields() | {"uplink": ""}))
    tensors, fields = good(names)
    with pytest.raises(MessageRefused):
        Coordinator(SHARED, by_samples).receive(ROUND, SILO, packed(tensors, fields))
    for other in CHAINS:
        if other != names:
            refused(names, packed(*good(other)))


def test_another_uplink_is_named():
    tensors, _ = good(("clip",))
    reason = refused(("clip", "laplace"), packed(tensors, good_fields() | {"uplink": "clip"}))
    assert "uplink=clip, expected clip,laplace" in reason


def changed(names: tuple[str, ...], name: str, tensor: torch.Tensor) -> bytes:
    tensors, fields = good(names)
    assert name in tensors
    return packed(tensors | {name: tensor}, fields)


SCALE = "global/down.weight:scale"
SCALES: dict[str, tuple[torch.Tensor, str]] = {
    "negative": (torch.tensor([1.0, -1.0]), "'global/down.weight' has a negative scale"),
    "overflows": (torch.tensor([3e38, 3e38]), "'global/down.weight' becomes NaN or infinity"),
}


@pytest.mark.parametrize("names", [("int8",), ("int4",), ("clip", "laplace", "int8")], ids=",".join)
@pytest.mark.parametrize("scale", SCALES)
def test_a_bad_scale_is_refused(names, scale):
    tensor, reason = SCALES[scale]
    assert reason in refused(names, changed(names, SCALE, tensor))


CODES: dict[str, tuple[str, str, torch.Tensor, str]] = {
    "int8 of -128": ("int8", "global/up.bias", torch.full((4,), -128, dtype=torch.int8), "a code below -127"),
    "int4 of -8": ("int4", "global/up.bias", torch.tensor([136, 128], dtype=torch.uint8), "a code below -7"),
    "int4, one more": (
        "int4",
        "head/out.weight",
        torch.tensor([136, 136, 152], dtype=torch.uint8),
        "has a nonzero padding code in its last byte",
    ),
    "fp16 infinite": ("fp16", "global/up.bias", torch.full((4,), math.inf, dtype=torch.float16), "NaN or infinity"),
    "fp16 NaN": ("fp16", "global/up.bias", torch.full((4,), math.nan, dtype=torch.float16), "NaN or infinity"),
}


@pytest.mark.parametrize("case", CODES)
def test_bad_codes_are_refused(case):
    codec, name, tensor, reason = CODES[case]
    assert reason in refused((codec,), changed((codec,), name, tensor))


def test_a_change_too_large_to_be_added_is_refused():
    huge = torch.tensor([0.0, 1.0, 3.4e38, -1.0])  # one number of four
    receiver = Coordinator({"global": {"up.bias": huge}}, by_samples, uplink=pipeline("clip"))
    message = change_message({"global/up.bias": huge}, "clip", ROUND, SILO, ROWS)
    with pytest.raises(MessageRefused, match="becomes NaN or infinity"):
        receiver.receive(ROUND, SILO, message)


@pytest.mark.parametrize("names", CHAINS, ids=",".join)
def test_a_diverged_change_is_refused_and_not_remembered(names):
    """NaN stays NaN, so that the round is told; the silo's next change is its own again.

    Under noise it counts as no change, because that training diverged would tell of rows.
    """
    broken = good_tensors()
    broken["global/up.bias"][1] = math.nan
    tensors, kept = pipeline(*names).send(broken, {}, SILO, ROUND)
    if {"gaussian", "laplace"} & {*names}:
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
        return
    assert "NaN or infinity" in refused(names, change_message(tensors, ",".join(names), ROUND, SILO, ROWS))
    assert all(torch.isfinite(tensor).all() for tensor in kept.values())


@pytest.mark.parametrize("names", [("int8",), ("int4",)], ids=",".join)
def test_any_codes_give_finite_parts_or_are_refused(names):
    draws = np.random.default_rng(3)
    received = 0
    for _ in range(200):
        tensors, fields = good(names)
        message = bytearray(packed(tensors, fields))
        start = 8 + int.from_bytes(message[:8], "little")
        for place in draws.integers(start, len(message), 3):
            message[place] = draws.integers(256)
        try:
            update = coordinator(names).receive(ROUND, SILO, bytes(message))
        except MessageRefused:
            continue
        received += 1
        assert all(torch.isfinite(tensor).all() for tensor in update.tensors.values())
    assert received > 20
    assert load(packed(*good(names))).keys() == good(names)[0].keys()
