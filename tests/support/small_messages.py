"""A coordinator that expects three small tensors, a valid message for it, and the check that it refuses one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save

from silotune.aggregation import by_samples
from silotune.communication.messages import MessageRefused
from silotune.training.coordinator import Coordinator

SILO, ROUND, ROWS = "alpha", 3, 40
SHARED = {"global": {"down.weight": torch.ones(2, 3), "up.bias": torch.zeros(4)}, "head": {"out.weight": torch.ones(5)}}
Tensors = dict[str, torch.Tensor]
Fields = dict[str, Any]


def coordinator() -> Coordinator:
    return Coordinator(SHARED, by_samples)


def good_tensors() -> Tensors:
    draws = torch.Generator().manual_seed(5)
    return {
        f"{part}/{name}": torch.randn(tensor.shape, generator=draws)
        for part, tensors in SHARED.items()
        for name, tensor in tensors.items()
    }


def packed(tensors: Tensors, fields: object) -> bytes:
    return save(tensors, metadata={"silotune": fields if isinstance(fields, str) else json.dumps(fields)})


def good_fields() -> Fields:
    return {"round": ROUND, "silo": SILO, "rows": ROWS}


GOOD = packed(good_tensors(), good_fields())


def refused(message: bytes, number: int = ROUND, silo: str = SILO) -> str:
    receiver = coordinator()
    with pytest.raises(MessageRefused) as caught:
        receiver.receive(number, silo, message)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)
