"""What silos that put together what they know learn of another one, from broadcasts that all of them see."""

from __future__ import annotations

import pytest
import torch

from silotune.core.serialization import read_tensors
from silotune.distributed.protocol.frames import decode
from tests.support.session_rig import federate

NOISE = ("aggregation.clip=0.05", "aggregation.noise_multiplier=1", "privacy.delta=1e-5")


def seen(config, out):
    """The broadcast of round 2, and every silo's update of round 1, by node."""
    _, link = federate(config, out)
    (broadcast,) = [
        frame.blobs["broadcast"]
        for node, data in link.sent
        if node == 0 and (frame := decode(data)).kind == "round" and frame.fields["round"] == 2
    ]
    updates = {
        node: read_tensors(frame.blobs["message"])
        for node, data in link.came
        if (frame := decode(data)).kind == "answer" and frame.fields["round"] == 1
    }
    return read_tensors(broadcast), updates


@pytest.fixture(scope="module")
def plain(tiny_config, tmp_path_factory):
    """What is seen in a run without noise."""
    return seen(tiny_config("fedmcp", "rounds=2", "train.steps=1"), tmp_path_factory.mktemp("plain") / "run")


def far(one, other):
    """The largest distance of two sets of tensors."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_two_of_three_silos_subtract_their_updates_from_the_mean(plain):
    mean, updates = plain
    assert len(updates) == 3
    rest = {name: 3 * mean[name] - updates[0][name] - updates[1][name] for name in mean}
    assert far(rest, updates[2]) < 1e-5
    assert far(updates[1], updates[2]) > 1e-4  # so it is this silo's update that they have


def test_one_silo_alone_has_the_sum_of_the_others(plain):
    """And no more: the same broadcast follows if the others' updates are exchanged, or share their sum otherwise."""
    mean, updates = plain
    rest = {name: 3 * mean[name] - updates[0][name] for name in mean}
    assert far(rest, {name: updates[1][name] + updates[2][name] for name in mean}) < 1e-5
    half = {name: rest[name] / 2 for name in mean}
    assert min(far(half, updates[1]), far(half, updates[2])) > 1e-4


def test_central_noise_stands_before_what_they_subtract(tiny_config, tmp_path):
    mean, updates = seen(tiny_config("fedmcp", "rounds=2", "train.steps=1", *NOISE), tmp_path / "run")
    rest = {name: 3 * mean[name] - updates[0][name] - updates[1][name] for name in mean}
    change = torch.cat([(updates[2][n] - updates[1][n]).reshape(-1) for n in mean]).norm()
    wrong = torch.cat([(rest[n] - updates[2][n]).reshape(-1) for n in mean]).norm()
    assert wrong > 3 * change
