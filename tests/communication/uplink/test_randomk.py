"""The codec `randomk`: only numbers are sent, both sides know where they belong, and nothing is lost by the way."""

from __future__ import annotations

import pytest
import torch

from silotune.communication.uplink import make_pipeline
from silotune.communication.uplink.sparse import RandomK, RandomKOptions
from silotune.config.uplink import UplinkConfig

NAME, SIZE = "global/w", 400


def drawn(seed=0, size=SIZE):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pipeline(seed=7, **options):
    return make_pipeline(UplinkConfig(name="randomk", **options), seed=seed)


def arrived(sender, reader, change, silo="a", number=1, read_as=None):
    """A message's tensors, and the change that the coordinator reads of them."""
    written, _ = sender.send({NAME: change}, {}, silo, number)
    origin = read_as or (silo, number)
    return written, dict(reader.changes(written, {NAME: torch.zeros(change.shape)}, *origin))[NAME]


@pytest.mark.parametrize("fraction", [0.01, 0.25, 1.0])
def test_a_message_holds_numbers_alone_and_the_coordinator_knows_their_places(fraction):
    change = drawn()
    written, found = arrived(pipeline(fraction=fraction), pipeline(fraction=fraction), change)
    count = round(fraction * SIZE)
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == {NAME: (count,)}
    places = found != 0
    assert int(places.sum()) == count
    assert torch.equal(found[places], change[places].float())


def test_places_follow_from_seed_silo_round_and_tensor_and_from_nothing_else():
    reference = arrived(pipeline(fraction=0.1), pipeline(fraction=0.1), drawn(1))[1] != 0
    other_numbers = arrived(pipeline(fraction=0.1), pipeline(fraction=0.1), drawn(2))[1] != 0
    assert torch.equal(reference, other_numbers)
    secret = make_pipeline(UplinkConfig(name="randomk", fraction=0.1), seed=7, secret=bytes(32))
    assert torch.equal(reference, arrived(secret, pipeline(fraction=0.1), drawn(1))[1] != 0)
    others = [
        arrived(pipeline(8, fraction=0.1), pipeline(8, fraction=0.1), drawn(1))[1],
        arrived(pipeline(fraction=0.1), pipeline(fraction=0.1), drawn(1), silo="b")[1],
        arrived(pipeline(fraction=0.1), pipeline(fraction=0.1), drawn(1), number=2)[1],
    ]
    assert not any(torch.equal(reference, other != 0) for other in others)
    misread = arrived(pipeline(fraction=0.1), pipeline(fraction=0.1), drawn(1), read_as=("b", 1))[1]
    assert not torch.equal(misread != 0, reference)


def test_every_place_is_as_likely():
    codec, counts = RandomK(RandomKOptions(fraction=0.1)), torch.zeros(50)
    for number in range(2000):
        seeded = codec.seeded(number.to_bytes(8, "big"))
        counts[seeded._positions((50,))] += 1
    assert counts.sum() == 2000 * 5
    assert (counts - 200).abs().max() < 5 * (2000 * 0.1 * 0.9) ** 0.5


@pytest.mark.parametrize("values", ["float32", "fp16", "int8", "int4"])
def test_what_is_left_out_is_kept_and_sent_later(values):
    """Σ sent + kept = Σ changes, exactly; and in time everything has been sent."""
    made = pipeline(fraction=0.1, values=values)
    memory, sent, total = {}, torch.zeros(SIZE), torch.zeros(SIZE, dtype=torch.float64)
    for number in range(1, 60):
        change = drawn(number) if number < 3 else torch.zeros(SIZE, dtype=torch.float64)
        total += change
        written, kept = made.send({NAME: change}, memory, "a", number)
        memory |= kept
        sent += dict(made.changes(written, {NAME: torch.zeros(SIZE)}, "a", number))[NAME]
        torch.testing.assert_close(sent.double() + memory[f"uplink/{NAME}"].double(), total, rtol=0, atol=1e-5)
    assert memory[f"uplink/{NAME}"].norm() < 0.2 * total.norm()


def test_unbiased_is_right_on_average():
    change, mean, rounds = drawn(3, 20), torch.zeros(20), 1000
    made = pipeline(fraction=0.25, unbiased=True)
    for number in range(rounds):
        found = arrived(made, made, change.repeat(4), number=number)[1]  # each number in four places
        mean += found.reshape(4, 20).mean(0) / rounds
    deviation = change.abs() * (3 / (4 * rounds)) ** 0.5  # of means of numbers 4 times as large, one time in 4
    assert ((mean - change).abs() < 5 * deviation).all()
    assert made.send({NAME: change}, {}, "a", 1)[1] == {}


def test_nan_anywhere_has_the_change_refused():
    change = drawn()
    change[13] = torch.nan
    assert arrived(pipeline(fraction=0.01), pipeline(fraction=0.01), change)[1].isnan().any()


def test_an_unbiased_codec_keeps_no_error():
    resolved = UplinkConfig(name="randomk", unbiased=True).model_dump()
    assert resolved["feedback"] is False
    assert UplinkConfig(**resolved).model_dump() == resolved
