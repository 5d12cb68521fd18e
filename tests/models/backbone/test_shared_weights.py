"""Weights that processes share: what is written to a shared file, what another process makes of it, and rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import load_backbone
from tests.support.fake_cuda import CUDA


def load(folder: str, precision: str, weights: Path | None = None) -> Backbone:
    family = "AutoModelForCausalLM" if "llama" in folder else "AutoModelForMaskedLM"
    return load_backbone(folder, precision=precision, model_class=family, weights=weights)


def states(backbone: Backbone) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backbone.model.named_parameters()}


def mapped_from(path: Path, tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are a file's, by Linux's map of this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    spans = [line[0].split("-") for line in lines if line[-1] == str(path)]
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in spans)


def test_weights_as_they_are_stored_are_shared_through_their_files(model_folder):
    backbone = load(str(model_folder("llama")), "fp32")
    assert backbone.share() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's map of the process")
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_converted_weights_are_in_memory_once(family, model_folder):
    folder = str(model_folder(family))
    backbone = load(folder, "bf16")
    before = states(backbone)
    identities = [id(tensor) for tensor in backbone.model.parameters()]
    shared = backbone.share()
    assert shared is not None
    assert backbone.share() == shared
    assert [id(tensor) for tensor in backbone.model.parameters()] == identities
    other = load(folder, "bf16", shared)
    for one in (backbone, other):
        found = dict(one.model.named_parameters())
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in before)
        assert all(mapped_from(shared, tensor) for tensor in found.values() if tensor.dim() > 1)
    assert other.fingerprint == backbone.fingerprint


class TestRest:
    """A backbone that is loaded for use on a device is not there before, and leaves it again."""

    @pytest.fixture
    def moves(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What happens to weights: `to` a device."""
        noted: list[str] = []
        monkeypatch.setattr("transformers.PreTrainedModel.to", lambda self, device: noted.append(str(device)))
        monkeypatch.setattr("silotune.models.backbone.loading.resolve_device", lambda _: CUDA)
        monkeypatch.setattr("silotune.models.backbone.loading.free_memory", lambda _: 2**40)
        monkeypatch.setattr("silotune.models.backbone.backbone.on_device", lambda tensors, _: tensors)
        return noted

    def test_it_is_placed_at_the_first_use_and_after_a_rest(self, moves, backbone_folder):
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

    def test_others_are_placed_at_once_and_stay(self, moves, backbone_folder):
        backbone = load_backbone(str(backbone_folder("bert")), precision="fp32")
        assert moves == ["cuda:0"]
        backbone.rest()
        backbone.place({})
        assert moves == ["cuda:0"]
