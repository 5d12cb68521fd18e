"""What arrives at the coordinator is refused unless it is exactly what was expected; nothing else is ever raised."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from silotune.aggregation import Update
from silotune.communication.messages import MessageRefused, read_broadcast
from tests.support.method_cases import read_message
from tests.support.small_messages import (
    GOOD,
    ROUND,
    ROWS,
    SHARED,
    SILO,
    coordinator,
    good_fields,
    good_tensors,
    packed,
    refused,
)


def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The good message with its raw safetensors header rewritten."""
    length = int.from_bytes(GOOD[:8], "little")
    header = json.loads(GOOD[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    return len(text).to_bytes(8, "little") + text + GOOD[8 + length :]


def test_a_good_message_is_received_as_it_was_sent():
    update = coordinator().receive(ROUND, SILO, GOOD)
    assert (update.silo, update.rows) == (SILO, ROWS)
    assert update.tensors.keys() == good_tensors().keys()
    assert all(torch.equal(update.tensors[name], tensor) for name, tensor in good_tensors().items())


def test_every_truncation_every_lengthening_and_every_false_length_is_refused():
    for length in range(len(GOOD)):
        refused(GOOD[:length])
    for length in (0, 1, 7, 2**16, 2**32, 2**63, 2**64 - 1):
        refused(length.to_bytes(8, "little") + GOOD[8:])
    refused(GOOD + b"\0")
    refused(GOOD + GOOD)


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '"round"',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"round": 3, "rows": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: f"{text[:8]}, {len(text)} characters",
)
def test_metadata_that_is_no_object_of_fields_is_refused(metadata):
    refused(packed(good_tensors(), metadata))


def test_no_metadata_or_another_programs_is_refused():
    refused(save(good_tensors()))
    refused(save(good_tensors(), metadata={"format": "pt"}))
    refused(save({}, metadata={"silotune": json.dumps(good_fields())}))


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [-4]},
        {"shape": [2**62, 4]},
        {"shape": [2, 2]},
        {"shape": [4, 1]},
        {"shape": [4.0]},
        {"shape": None},
        {"data_offsets": [0, 0]},
        {"data_offsets": [16, 0]},
        {"data_offsets": [-16, 0]},
        {"data_offsets": [0, 2**63]},
        {"data_offsets": [8, 24]},  # over another tensor's bytes
        *({"dtype": other} for other in ("F4", "F8_E5M2", "U16", "C64", "F32 ", "f32", "", 3, None)),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(entry):
    refused(with_header(lambda header: header["global/up.bias"].update(entry)))


def test_a_pickle_is_refused_and_not_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("went off").touch, ())

    torch.save({"global/up.bias": Bomb()}, tmp_path / "bomb.pt")
    refused((tmp_path / "bomb.pt").read_bytes())
    assert not (tmp_path / "went off").exists()


def test_any_flipped_bit_is_refused_or_leaves_a_well_formed_update():
    """Flips in the numbers or in the row count can give another well-formed update, and nothing else may."""
    length = int.from_bytes(GOOD[:8], "little")
    header_flips = [(byte, bit) for byte in range(8 + length) for bit in range(8)]
    draws = np.random.default_rng(4)
    body_flips = [
        (8 + length + int(draws.integers(len(GOOD) - 8 - length)), int(draws.integers(8))) for _ in range(200)
    ]
    received = 0
    for byte, bit in header_flips + body_flips:
        message = bytearray(GOOD)
        message[byte] ^= 1 << bit
        try:
            update = coordinator().receive(ROUND, SILO, bytes(message))
        except MessageRefused:
            continue
        received += 1
        assert update.silo == SILO
        assert 1 <= update.rows <= 2**53
        assert {name: tuple(tensor.shape) for name, tensor in update.tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in good_tensors().items()
        }
        assert all(tensor.dtype is torch.float32 and tensor.isfinite().all() for tensor in update.tensors.values())
    assert 100 < received < 300  # mostly the flips among the numbers


def test_the_largest_row_count_still_averages_to_finite_numbers():
    receiver = coordinator()
    rows = [2**53, 1, 2**53]
    updates = [
        receiver.receive(ROUND, silo, packed(good_tensors(), {"round": ROUND, "silo": silo, "rows": count}))
        for silo, count in zip("abc", rows, strict=True)
    ]
    assert all(isinstance(update, Update) for update in updates)
    receiver.aggregate(updates)
    assert all(tensor.isfinite().all() for tensors in receiver.shared.values() for tensor in tensors.values())


def test_a_broadcast_is_checked_by_the_silo_as_well():
    receiver = coordinator()
    broadcast = receiver.broadcast(2)
    found, number = read_broadcast(broadcast, receiver.expected)
    assert number == 2
    assert {part: sorted(tensors) for part, tensors in found.items()} == {part: sorted(t) for part, t in SHARED.items()}
    tensors, _ = read_message(broadcast)
    for message in (broadcast[:-1], GOOD, save(tensors), packed(tensors | {"x/y": torch.ones(1)}, {"round": 2})):
        with pytest.raises(MessageRefused):
            read_broadcast(message, receiver.expected)
    tensors["head/out.weight"][0] = math.nan
    with pytest.raises(MessageRefused, match="NaN"):
        read_broadcast(packed(tensors, {"round": 2}), receiver.expected)
    assert load(broadcast).keys() == tensors.keys()
