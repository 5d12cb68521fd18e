"""IFCA: two rounds recomputed outside silotune in float64; the coordinator's groups, and when there are none."""

from __future__ import annotations

import pytest
import torch

from silotune.aggregation import Update
from silotune.errors import InputError
from silotune.methods.ifca import GroupMeans, of_group
from silotune.training.coordinator import Coordinator
from tests.support.rounds_by_hand import Stage, descended
from tests.support.silos_by_hand import loss_of, run_rounds, set_up


def test_ifca(tiny_federation):
    """Each silo descends from the group with the least loss; groups become the means of their silos."""
    federation, wholes = set_up(
        tiny_federation, "ifca", "method.groups=3", "partition.silos=4", "aggregation=ifca", "data.seed=3"
    )
    first = next(iter(wholes.values()))
    models = [{part: first[of_group(part, group, 3)] for part in ("global", "head")} for group in range(3)]
    visited = set()
    for _ in range(2):
        members = {}
        for name in wholes:

            def loss(model, name=name):
                return loss_of(federation, name, model["head"], (1, model["global"]))

            losses = [float(loss(model)) for model in models]
            group = losses.index(min(losses))
            members.setdefault(group, []).append((name, descended(models[group], [Stage(("global", "head"), loss)])))
        visited |= {*members}
        for group, silos in members.items():
            models[group] = {
                part: {key: sum(model[part][key] for _, model in silos) / len(silos) for key in models[group][part]}
                for part in models[group]
            }
    run_rounds(federation)
    assert len(visited) > 1
    chosen = {name: group for group, silos in members.items() for name, _ in silos}
    assert federation.coordinator.report == {"groups": chosen}
    for name, group in chosen.items():
        received = federation.coordinator.shared_of(name)
        for further in range(3):
            for part, expected in models[(group + further) % 3].items():
                torch.testing.assert_close(received[of_group(part, further, 3)], expected, rtol=0, atol=1e-9)


def test_groups_are_kept_move_and_weigh_by_rows():
    shared = {part: {"w": torch.full((2,), value)} for part, value in (("global", 0.0), ("global-1", 9.0))}
    coordinator = Coordinator(shared, GroupMeans())

    def sent(silo, rows, value, choice):
        return Update(silo, {"global/w": torch.full((2,), value)}, rows, score=choice)

    coordinator.aggregate([sent("a", 1, 1.0, 0), sent("b", 3, 5.0, 0), sent("c", 7, 8.0, 1)], 1)
    assert [float(coordinator.shared_of("c")[part]["w"][0]) for part in ("global", "global-1")] == [8, 4]
    kept, coordinator = coordinator.flat(), Coordinator(shared, GroupMeans())
    coordinator.load_flat(kept)
    coordinator.aggregate([sent("c", 7, 2.0, 1), sent("new", 7, 3.0, 1)], 2)  # c goes back, a silo that comes leaves 0
    assert coordinator.report == {"groups": {"a": 0, "b": 0, "c": 0, "new": 1}}
    assert [float(coordinator.shared_of("a")[part]["w"][0]) for part in ("global", "global-1")] == [2, 3]
    assert coordinator.broadcast(3, "a") != coordinator.broadcast(3, "new")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("head=verbalizer",), "method ifca: groups begin with unlike heads; allowed: head=linear, mlp, entities"),
        (("aggregation.secure=true",), "secure: ifca is no sum of the silos' updates"),
        (
            ("privacy.unit=row", "privacy.epsilon=8"),
            "privacy.unit: aggregation=ifca reads a number of silos' rows that",
        ),
        (("method.head_rounds=1",), "method.head_rounds: the heads of all groups would become one mean; leave it out"),
        (("aggregation=samples",), "aggregation=samples: method ifca is not defined for it; allowed: ifca"),
    ],
)
def test_what_groups_are_not_made_for(words, line, tiny_federation):
    with pytest.raises(InputError, match=line):
        tiny_federation("ifca", "tuner=lora", *words)
