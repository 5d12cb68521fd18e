"""The mean of the other silos' last updates: by NumPy, with absent silos, at the coordinator and after a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silotune.aggregation import Update
from silotune.errors import InputError
from silotune.methods.fedalt import RestOfWorld
from silotune.training.coordinator import Coordinator

START = {"w": np.ones((2, 3)), "b": np.zeros(2)}
ROUNDS = (("north", "south", "west"), ("south", "west"), ("north", "south"))
"""Who is there: everyone, then without north, then without west."""


def make() -> Coordinator:
    shared = {"global": {name: torch.tensor(value) for name, value in START.items()}}
    return Coordinator(shared, RestOfWorld())


def test_by_hand_with_absent_silos_and_a_restart() -> None:
    draws, last = np.random.default_rng(2), {}
    coordinator = make()
    for name in START:
        assert torch.equal(coordinator.shared_of("north")["global"][name], coordinator.shared["global"][name])
    for number, present in enumerate(ROUNDS):
        last |= {silo: {name: draws.normal(size=value.shape) for name, value in START.items()} for silo in present}
        updates = [
            Update(silo, {f"global/{name}": torch.tensor(value) for name, value in last[silo].items()}, rows)
            for rows, silo in enumerate(present, 1)
        ]
        coordinator.aggregate(updates, number)
        if number == 1:
            kept, coordinator = coordinator.flat(), make()
            coordinator.load_flat(kept)
        for silo in (*last, "newcomer"):
            for name, found in coordinator.shared_of(silo)["global"].items():
                expected = np.mean([last[other][name] for other in last if other != silo], axis=0)
                np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-14)
        for name, found in coordinator.shared["global"].items():
            mean = np.mean([each[name] for each in last.values()], axis=0)
            np.testing.assert_allclose(found.numpy(), mean, rtol=0, atol=1e-14)


def test_a_silo_alone_receives_a_lora_that_does_nothing() -> None:
    coordinator = make()
    coordinator.aggregate([Update("north", {f"global/{n}": torch.tensor(v) for n, v in START.items()}, 3)], 1)
    assert not any(tensor.any() for tensor in coordinator.shared_of("north")["global"].values())
    assert all(torch.equal(t, torch.tensor(START[n])) for n, t in coordinator.shared_of("south")["global"].items())


def test_broadcasts_differ_by_silo_and_are_made_once() -> None:
    coordinator = make()
    assert coordinator.broadcast(1, "north") == coordinator.broadcast(1)
    coordinator.aggregate(
        [
            Update(silo, {f"global/{name}": torch.full(value.shape, weight) for name, value in START.items()}, 1)
            for silo, weight in {"north": 1.0, "south": 2.0}.items()
        ],
        1,
    )
    assert coordinator.broadcast(2, "north") is coordinator.broadcast(2, "north")
    assert coordinator.broadcast(2, "north") != coordinator.broadcast(2, "south")


@pytest.mark.parametrize("words", [["server.optimizer=avgm"], ["server.lr=0.5"]])
def test_a_step_along_one_mean_is_refused(words, tiny_federation) -> None:
    with pytest.raises(InputError, match="aggregation=rest-of-world: every silo receives tensors of its own"):
        tiny_federation("fedalt", *words)
