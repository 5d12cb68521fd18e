"""LoRA+ (`tuner.lr_ratio`): B learns at a multiple of A's rate, under every optimizer; divided as by peft."""

from __future__ import annotations

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from silotune.config import TrainConfig
from silotune.errors import InputError
from silotune.models.tuners import TUNERS
from silotune.training.phase_optimizer import FACTOR, PhaseOptimizer, Schedule, make_groups, make_optimizer
from tests.support.tuner_families import make_backbone, make_model

RATIO = 16.0
NAMES = ("global/query.lora_A.weight", "global/query.lora_B.weight", "head/out.weight", "head/out.bias")


def leaves():
    draws = torch.Generator().manual_seed(3)
    return {name: torch.randn(3, 4, generator=draws).requires_grad_() for name in NAMES}


def factor(name: str) -> float:
    return RATIO if name.endswith("lora_B.weight") else 1.0


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("decay", [None, 0.1])
def test_each_tensor_moves_as_under_an_optimizer_with_its_own_rate(optimizer, decay):
    """Two steps under a schedule; B alone as with 16 times the learning rate."""
    moved = {}
    for rate, chosen in ((1.0, factor), (1.0, lambda name: 1.0), (RATIO, lambda name: 1.0)):
        train = TrainConfig(lr=1e-3 * rate, optimizer=optimizer, weight_decay=decay, schedule="linear")
        tensors = leaves()
        made = PhaseOptimizer(train, [tensors], [Schedule(train, 4)], torch.device("cpu"), False, chosen)
        for step in range(2):
            made.zero_grad()
            sum((tensor * number).square().sum() for number, tensor in enumerate(tensors.values(), 1)).backward()
            made.step({0: step})
        moved[rate, chosen is factor] = tensors
    for name in NAMES:
        expected = moved[RATIO if factor(name) != 1 else 1.0, False][name]
        torch.testing.assert_close(moved[1.0, True][name], expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(moved[1.0, True][NAMES[1]], moved[1.0, False][NAMES[1]])


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_the_tensors_are_divided_as_by_peft(name):
    tuner = TUNERS[name](TUNERS[name].Options(r=4, lr_ratio=RATIO))
    part = tuner.init(make_backbone("bert"), [], torch.Generator().manual_seed(1))
    groups = make_groups(TrainConfig(), part, tuner.rate_factor)
    own = {id(tensor): group[FACTOR] for group in groups for tensor in group["params"]}
    assert list(make_optimizer(TrainConfig(), groups).param_groups[1])  # torch takes the groups as they are
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], use_dora=name == "dora")
    model = peft.get_peft_model(make_model("bert"), config)
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=RATIO)
    rates = {id(tensor): group["lr"] for group in theirs.param_groups for tensor in group["params"]}
    compared = 0
    for key, tensor in model.named_parameters():
        if tensor.requires_grad:
            ours = key.removeprefix("base_model.model.").replace(".default", "")
            ours = ours.removesuffix(".weight") if "magnitude" in ours else ours
            assert own[id(part[ours])] == rates[id(tensor)]
            compared += 1
    assert compared == len(part)


def test_in_a_run_b_takes_larger_steps(tiny_federation):
    """Adam's first step is of the learning rate's size in every number."""
    words = ("tuner=lora", "train.steps=1", "train.lr=0.001", "method.adapters=1")
    for ratio in (1.0, 4.0):
        federation = tiny_federation("fedavg", *words, f"tuner.lr_ratio={ratio}")
        shared = federation.coordinator.shared
        result = federation.trainer.rounds([federation.silos["alpha"]], shared, 1)[0].state["global"]
        for name, tensor in result.items():
            step = float((tensor - shared["global"][name]).abs().max())
            if name.endswith("lora_B.weight"):
                assert step == pytest.approx(0.001 * ratio, rel=1e-3)
            else:
                assert step == 0  # no gradient reaches A while B is 0


@pytest.mark.parametrize("tuner", ["ia3", "vera", "bottleneck"])
def test_refused_where_there_is_no_b(tuner, tiny_config):
    with pytest.raises(InputError, match=r"unknown key 'tuner\.lr_ratio'") as refused:
        tiny_config("fedavg", f"tuner={tuner}", "tuner.lr_ratio=4")
    assert "\n" not in str(refused.value)
