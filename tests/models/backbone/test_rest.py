"""A backbone that is loaded for use on a device is not there before, and leaves it again."""

from __future__ import annotations

import pytest
import torch

from silotune.models.backbone.loading import load_backbone
from tests.support.fake_cuda import CUDA


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to weights: `to` a device."""
    noted: list[str] = []
    monkeypatch.setattr("transformers.PreTrainedModel.to", lambda self, device: noted.append(str(device)))
    monkeypatch.setattr("silotune.models.backbone.loading.resolve_device", lambda _: CUDA)
    monkeypatch.setattr("silotune.models.backbone.loading.free_memory", lambda _: 2**40)
    monkeypatch.setattr("silotune.models.backbone.backbone.on_device", lambda tensors, _: tensors)
    return noted


def test_it_is_placed_at_the_first_use_and_after_a_rest(moves, backbone_folder):
    backbone = load_backbone(str(backbone_folder("bert")), precision="fp32", on_use=True)
    assert moves == []
    backbone.place({})
    backbone.place({})
    assert moves == ["cuda:0"]
    on_host = [tensor.data_ptr() for tensor in backbone.model.parameters()]
    backbone.base.embeddings.word_embeddings.weight.data = torch.zeros(1)  # as if it were elsewhere
    backbone.rest()
    backbone.rest()
    assert [tensor.data_ptr() for tensor in backbone.model.parameters()] == on_host
    backbone.place({})
    assert moves == ["cuda:0", "cuda:0"]


def test_others_are_placed_at_once_and_stay(moves, backbone_folder):
    backbone = load_backbone(str(backbone_folder("bert")), precision="fp32")
    assert moves == ["cuda:0"]
    backbone.rest()
    backbone.place({})
    assert moves == ["cuda:0"]
