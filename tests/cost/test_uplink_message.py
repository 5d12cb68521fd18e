"""What `silotune cost` counts of a message with an uplink is what a run sends."""

from __future__ import annotations

import pytest
import torch

from silotune.communication.messages import Expected, change_message, pack
from silotune.communication.uplink import BUILT_IN_CODECS
from silotune.core.tensors import flatten
from silotune.cost import estimate
from silotune.cost.estimate import _DTYPES, ROWS, SILO, _size
from tests.support.uplink_changes import pipeline


@pytest.mark.parametrize("uplink", [*BUILT_IN_CODECS, "clip", "clip,laplace,int4"])
def test_the_counted_message_is_as_long_as_a_real_one(uplink, tiny_federation, backbone_folder):
    federation = tiny_federation("fedmcp")
    shared = flatten(federation.coordinator.shared)
    uplink_steps = pipeline(*uplink.split(","))
    sent = change_message(uplink_steps.send(shared, {}, SILO, 1)[0], uplink, 1, SILO, ROWS)
    words = [f"backbone={backbone_folder('bert')}", f"uplink={uplink}"]
    cost = estimate("fedmcp", words, count_flops=False)
    assert cost.message_bytes == len(sent)
    assert cost.bytes_down == cost.silos * len(federation.coordinator.broadcast(1))


def test_the_counted_length_holds_for_every_dtype_that_a_codec_may_write():
    shapes = {f"part/{'tensor' * (number % 3)}{number}": (number % 4, 3) for number in range(2 * len(_DTYPES))}
    dtypes = {name: list(_DTYPES)[number % len(_DTYPES)] for number, name in enumerate(shapes)}
    tensors = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    fields = {"round": 1, "silo": SILO, "rows": ROWS}
    assert _size(Expected(shapes, dtypes), fields) == len(pack(tensors, fields))
