"""A silo judges a run by the shapes of its parts; tensors of their size are made after the operator approved it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from silotune.core.tensors import flatten
from silotune.distributed.silo.approvals import Approvals
from silotune.distributed.silo.planned_parts import PlannedParts
from silotune.runs.build.builder import build
from tests.support.malicious import ALLOWED, Malicious
from tests.support.session_rig import local_configs

TUNERS = ("full", "bottleneck", "lora", "prefix", "prompt", "p-tuning", "bitfit", "ia3")


class Largest(TorchFunctionMode):
    """Notes the most numbers of a tensor that has memory."""

    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not isinstance(result, FakeTensor) and result.device.type != "meta":
            self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize(
    ("method", "tuner"),
    [
        ("fedavg", {"name": "p-tuning", "width": 3000, "layers": 3}),
        ("fedavg", {"name": "prefix", "reparametrise": 100_000}),
        ("ditto", {"name": "lora", "r": 1_000_000}),
    ],
)
def test_nothing_of_size_is_made_before_approval(tiny_config, tmp_path, method, tuner):
    local = local_configs(tiny_config(method), tmp_path / "silo", approval="ask")["alpha"]
    coordinator = Malicious(local, tiny_config(method), changes={"tuner": tuner})
    with Largest() as largest:
        assert coordinator.ask("hello").kind == "waiting"
    assert largest.numbers < 500_000
    (request,) = Approvals(coordinator.session._setup.limits.ledger.folder).all()
    assert request.configuration["tuner"]["name"] == tuner["name"]


@pytest.mark.parametrize(("method", "tuner"), [("fedavg", tuner) for tuner in TUNERS] + [("fedmcp", "bottleneck")])
def test_planned_shapes_are_those_of_the_parts(tiny_config, method, tuner):
    federation = build(tiny_config(method, f"tuner={tuner}"))
    context, silo = federation.context, next(iter(federation.silos.values()))
    planned = PlannedParts.of(context, silo)
    tasks = [rows.task for rows in silo.train.values()]
    for made, shapes in (
        (context.initial.shared([silo]), planned.shared),
        (context.initial.private(silo.name, tasks), planned.private),
    ):
        assert all(isinstance(tensor, FakeTensor) for tensor in flatten(shapes).values())
        assert {name: tensor.shape for name, tensor in flatten(made).items()} == {
            name: tensor.shape for name, tensor in flatten(shapes).items()
        }


def test_private_parts_are_bounded(attack):
    coordinator = attack(("ditto", *ALLOWED[1:]), policy={"private_numbers": 10})
    assert "numbers in private parts; at most 10 (10; policy.private_numbers)" in coordinator.reason("hello")


def test_factors_of_a_plan_are_not_kept_for_those_of_the_weight(attack):
    assert attack((*ALLOWED, "tuner=lora", "tuner.init=pissa")).reason() == ""
