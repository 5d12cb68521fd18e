"""Weights larger than the device's free memory are refused before they are read, with what would fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from silotune.errors import InputError
from silotune.models.backbone import memory
from silotune.models.backbone.loading import load_backbone, weight_files

SHAPES = {"model.embed_tokens.weight": [1000, 64], "model.layers.0.up.weight": [640, 6400], "model.norm.weight": [64]}
MATRIX, REST = 640 * 6400, 1000 * 64 + 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The header of a weight file; there are no weights behind it."""
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in SHAPES.items()}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def refusal(file: Path, free: int, monkeypatch: pytest.MonkeyPatch, dtype=torch.float32, trained=False) -> str:
    monkeypatch.setattr(memory, "free_memory", lambda _: free)
    with pytest.raises(InputError) as refused:
        memory.require_room_for_weights("big", [file], dtype, torch.device("cuda:0"), "none", trained)
    return str(refused.value)


def test_sizes_are_those_of_the_shapes(file):
    shapes = memory.stored_shapes([file])
    assert memory.weight_bytes(shapes, torch.float32) == 4 * (MATRIX + REST)
    assert memory.weight_bytes(shapes, torch.bfloat16) == 2 * (MATRIX + REST)
    assert memory.weight_bytes(shapes, torch.bfloat16, "int8") == MATRIX + 2 * REST
    assert memory.weight_bytes(shapes, torch.bfloat16, "nf4") == int(0.5625 * MATRIX) + 2 * REST


def test_what_would_fit_is_named_and_nothing_else(file, monkeypatch):
    everything = refusal(file, 2 * (MATRIX + REST), monkeypatch)
    assert everything.startswith("backbone: the weights of 'big' take 0.0 GiB, and cuda:0 has 0.0 GiB free; what would")
    assert all(words in everything for words in ("precision=bf16 (", "quantization=int8 (", "quantization=nf4 ("))
    smaller = refusal(file, 2 * (MATRIX + REST) - 1, monkeypatch)
    assert "bf16" not in smaller
    assert "int8" in smaller
    smallest = refusal(file, MATRIX, monkeypatch, torch.bfloat16)
    assert "int8" not in smallest
    assert "nf4" in smallest
    assert "no smaller precision of it would fit; the smallest is" in refusal(file, 1000, monkeypatch)
    assert "tuner=full keeps float32" in refusal(file, 2 * (MATRIX + REST), monkeypatch, trained=True)


def test_weights_that_fit_are_not_refused(file, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: 4 * (MATRIX + REST))
    memory.require_room_for_weights("big", [file], torch.float32, torch.device("cuda:0"), "none", False)


def test_a_backbone_is_refused_before_it_is_read(backbone_folder, monkeypatch):
    folder = str(backbone_folder("bert"))
    needed = memory.weight_bytes(memory.stored_shapes(weight_files(folder)), torch.float32)
    monkeypatch.setattr(memory, "free_memory", lambda _: needed - 1)
    monkeypatch.setattr("silotune.models.backbone.loading._read", None)
    with pytest.raises(InputError, match=r"take .* free; what would fit: precision=bf16"):
        load_backbone(folder, precision="fp32")


def test_the_machine_says_what_it_has():
    assert 2**20 < memory.free_memory(torch.device("cpu")) < 2**50
