"""Private parts begin in each silo by its own draws, or alike in all."""

from __future__ import annotations

import pytest
import torch

from silotune.core.tensors import flatten
from silotune.data.tasks import Task
from silotune.methods.parts import HEAD, private
from silotune.training.initial_parts import InitialParts

TASK = Task("mood", ("bad", "good"))


@pytest.mark.parametrize("alike", [False, True])
def test_heads_begin_alike_where_the_part_says_so(tiny_federation, alike: bool) -> None:
    federation = tiny_federation("fedavg")
    method = federation.method
    parts = method.parts() | {HEAD: private(method.setting.head, alike=alike)}
    initial = InitialParts(federation.backbone, method, parts, 1, None)
    north, south = (flatten(initial.private(silo, [TASK])) for silo in ("north", "south"))
    assert north.keys() == south.keys() != set()
    equal = [torch.equal(north[name], south[name]) for name in north if north[name].std() > 0]
    assert equal == [alike] * len(equal) != []
    again = flatten(InitialParts(federation.backbone, method, parts, 2, None).private("north", [TASK]))
    assert not all(torch.equal(north[name], again[name]) for name in north)
