"""What `silotune cost` counts of a message with an uplink is what a run sends."""

from __future__ import annotations

import pytest

from silotune.communication.messages import change_message
from silotune.communication.uplink import BUILT_IN_CODECS
from silotune.core.tensors import flatten
from silotune.cost import estimate
from silotune.cost.estimate import ROWS, SILO
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
