"""Weight decay, clipping, and optimizers whose state is kept from round to round."""

from __future__ import annotations

import pytest
import torch

from silotune.config import TrainConfig
from silotune.core.tensors import digest, flatten
from silotune.training.client import SiloClient
from silotune.training.phase_optimizer import KEPT, PhaseOptimizer, Schedule, make_groups, make_optimizer, pack, restore

NAMES = {
    "global/encoder.layer.0.attention.self.query.lora_A.weight": True,
    "global/encoder.layer.0.attention.output.down.bias": False,
    "global/encoder.layer.0.output.LayerNorm.weight": False,
    "global/model.layers.0.input_layernorm.weight": False,
    "global/model.norm.weight": False,
    "global/h.0.ln_1.weight": False,
    "head/bias_normal.out.weight": True,
    "head/bias_normal.out.bias": False,
}
"""Name of a tensor → whether its weights decay; a task may have any name."""


def tensors(count: int = 2) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {f"p/{n}.weight": torch.randn(3, 4, generator=draws).requires_grad_() for n in range(count)}


def gradients(leaves, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for leaf in leaves.values():
        leaf.grad = torch.randn(leaf.shape, generator=draws)


def test_biases_and_norms_do_not_decay():
    leaves = {name: torch.ones(2, requires_grad=True) for name in NAMES}
    groups = make_groups(TrainConfig(optimizer="adamw", weight_decay=0.3), leaves)
    found = {id(tensor): group["weight_decay"] for group in groups for tensor in group["params"]}
    assert {name: found[id(leaf)] == 0.3 for name, leaf in leaves.items()} == NAMES


def test_the_decay_of_adamw_is_said_or_torchs():
    leaves = tensors()
    given = {
        decay: [group["weight_decay"] for group in make_optimizer(train, make_groups(train, leaves)).param_groups]
        for decay in (None, 0.0, 0.2)
        for train in [TrainConfig(optimizer="adamw", weight_decay=decay)]
    }
    assert given == {None: [0.01], 0.0: [0.0], 0.2: [0.2]}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd", "adam"])
def test_decay_by_hand(optimizer):
    """Without gradient: decoupled decay shrinks by lr · decay; else the optimizer steps along the weights."""
    train = TrainConfig(optimizer=optimizer, lr=0.1, weight_decay=0.2)
    leaves = tensors(1)
    (leaf,) = leaves.values()
    before = leaf.detach().clone()
    made = make_optimizer(train, make_groups(train, leaves))
    leaf.grad = torch.zeros_like(leaf)
    made.step()
    expected = before - 0.1 * before.sign() if optimizer == "adam" else before * (1 - 0.1 * 0.2)
    torch.testing.assert_close(leaf.detach(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("silos", [1, 2])
def test_gradients_are_clipped_to_the_norm_of_each_silo(silos):
    train = TrainConfig(optimizer="sgd", lr=1.0, clip_norm=0.5)
    leaves = [tensors() for _ in range(silos)]
    before = [{name: leaf.detach().clone() for name, leaf in own.items()} for own in leaves]
    schedule = Schedule.of(train, 1, 1, 1)
    optimizer = PhaseOptimizer(train, leaves, [schedule] * silos, torch.device("cpu"), scaled=False)
    for silo, own in enumerate(leaves):
        gradients(own, silo)
    norms = [torch.cat([leaf.grad.flatten() for leaf in own.values()]).norm() for own in leaves]
    optimizer.step(dict.fromkeys(range(silos), 0))
    for own, earlier, norm in zip(leaves, before, norms, strict=True):
        assert norm > 1
        moved = torch.cat([(leaf.detach() - earlier[name]).flatten() for name, leaf in own.items()])
        assert moved.norm() == pytest.approx(0.5, rel=1e-4)


def test_short_gradients_stay(tiny_federation):
    wide, none = (tiny_federation("fedavg", "train.steps=2", *words) for words in (("train.clip_norm=1e6",), ()))
    ends = [f.trainer.rounds([f.silos["alpha"]], f.coordinator.shared, 1)[0].state for f in (wide, none)]
    assert digest(flatten(ends[0])) == digest(flatten(ends[1]))


@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor"])
def test_a_kept_state_goes_on(name):
    """Two steps, a new optimizer with the packed state, two more steps: the bits of four steps."""
    train = TrainConfig(optimizer=name, lr=0.1)
    ends = []
    for renewed in (False, True):
        leaves = tensors()
        optimizer = make_optimizer(train, make_groups(train, leaves))
        for step in range(4):
            if renewed and step == 2:
                memory = pack(optimizer, "train", leaves)
                assert all(key.startswith(f"{KEPT}/train/p/") for key in memory)
                leaves = {key: leaf.detach().clone().requires_grad_() for key, leaf in leaves.items()}
                optimizer = make_optimizer(train, make_groups(train, leaves))
                restore(optimizer, "other", leaves, memory)
                assert not optimizer.state
                restore(optimizer, "train", leaves, memory)
            gradients(leaves, step)
            optimizer.step()
        ends.append(digest({key: leaf.detach() for key, leaf in leaves.items()}))
    assert ends[0] == ends[1]


def test_a_silo_keeps_its_optimizer_and_sends_nothing_of_it(tiny_federation):
    federation = tiny_federation("fedmcp", "train.keep_optimizer=true", "train.steps=3")
    client: SiloClient = federation.client()
    silo, coordinator = federation.silos["alpha"], federation.coordinator
    kept = []
    for number in (1, 2):
        (reply,) = client.rounds([silo], coordinator.broadcast(number))
        assert coordinator.read_reply(number, reply).refusal == ""  # names and shapes are the shared parts'
        kept.append({key: tensor for key, tensor in silo.state.memory.items() if key.startswith(KEPT)})
    assert kept[0].keys() == kept[1].keys()
    counts = [{float(tensor) for key, tensor in memory.items() if key.endswith("/step")} for memory in kept]
    assert counts == [{3.0}, {6.0}]


def test_a_kept_optimizer_changes_the_next_round_and_not_the_first(tiny_federation):
    found = []
    for words in ((), ("train.keep_optimizer=true",)):
        federation = tiny_federation("fedavg", "train.steps=2", *words)
        silo, coordinator = federation.silos["alpha"], federation.coordinator
        client = federation.client()
        found.append([client.rounds([silo], coordinator.broadcast(number))[0].message for number in (1, 2)])
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
