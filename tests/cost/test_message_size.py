"""The counted message against real ones."""

from __future__ import annotations

import pytest

from silotune.communication.messages import shared_tensors, update_message
from silotune.cost import estimate
from silotune.cost.estimate import ROWS, SILO
from silotune.errors import InputError
from silotune.methods.lora_factors import A, B

ADAPTERS = {"fedmcp": (), "fedavg": ("method.adapters=2",), "fedavg-full": ()}


@pytest.mark.parametrize("method", list(ADAPTERS))
def test_it_is_as_long_as_a_silos_real_update(method, tiny_federation, backbone_folder):
    federation = tiny_federation(method)
    training, silo = federation.context, federation.silos["alpha"]
    state = training.initial.shared(federation.silos.values()) | training.state_of(silo).private
    sent = update_message(state, training.parts, 1, SILO, ROWS)
    broadcast = federation.coordinator.broadcast(1)
    cost = estimate(method, [f"backbone={backbone_folder('bert')}", "silos=3", *ADAPTERS[method]], count_flops=False)
    assert cost.sent_parameters == sum(t.numel() for t in shared_tensors(state, training.parts).values())
    assert cost.message_bytes == len(sent)
    assert (cost.bytes_up, cost.bytes_down) == (3 * len(sent), 3 * len(broadcast))


def test_silos_of_other_ranks_are_counted_as_such(tiny_federation, backbone_folder):
    words = ("tuner=lora", "tuner.r=5", "tuner.ranks.beta=2")
    federation = tiny_federation("hetlora", *words)
    coordinator, training = federation.coordinator, federation.context
    down = sum(len(coordinator.broadcast(1, silo)) for silo in federation.silos)
    up = sum(
        len(update_message(coordinator.shared_of(silo), training.sent(1), 1, SILO, ROWS)) for silo in federation.silos
    )
    words = (f"backbone={backbone_folder('bert')}", *words)
    cost = estimate("hetlora", [*words, "silos=3"], count_flops=False)
    assert (cost.bytes_up, cost.bytes_down) == (up, down)
    assert cost.message_bytes > up / 3
    with pytest.raises(InputError, match=r"silos: 1 a round, but tuner\.ranks names 2"):
        estimate("hetlora", [*words, "tuner.ranks.alpha=3", "silos=1"], count_flops=False)


def test_the_larger_update_of_two_kinds_of_rounds_counts(backbone_folder):
    """RoLoRA sends B in odd rounds and A in even ones; in front of a narrowing layer A is the wider one."""
    words = [f"backbone={backbone_folder('bert')}", "tuner=lora", "tuner.sites=feedforward_output", "rounds=2"]
    both = estimate("rolora", words, count_flops=False)
    first = estimate("rolora", [*words, "rounds=1"], count_flops=False)
    sizes = {part.part: part.parameters for part in both.parts}
    assert sizes[A] > sizes[B]
    assert both.message_bytes - first.message_bytes == pytest.approx(4 * (sizes[A] - sizes[B]), abs=64)  # + header
