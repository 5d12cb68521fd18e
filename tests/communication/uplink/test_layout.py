"""A codec that encodes against its own layout is refused where it encodes, not by a coordinator in every round."""

from __future__ import annotations

import pytest
import torch

from silotune.communication.uplink.codecs import Float16
from silotune.communication.uplink.pipeline import UplinkPipeline
from silotune.errors import InputError


class Wide(Float16):
    """Writes what it says it would shorten."""

    def encode(self, tensor: torch.Tensor, uniform: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {name: value.float() for name, value in super().encode(tensor, uniform).items()}


def test_a_codec_keeps_to_its_layout() -> None:
    change = {"global/a": torch.ones(2, 3)}
    assert UplinkPipeline(("float16",), codec=Float16()).send(change, {}, "north", 1)[0]
    with pytest.raises(InputError, match=r"codec Wide: encodes 'global/a' as .*float32.*; its layout is .*float16"):
        UplinkPipeline(("wide",), codec=Wide()).send(change, {}, "north", 1)
