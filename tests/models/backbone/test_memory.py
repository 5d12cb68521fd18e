"""Weights larger than the device's free memory are refused before they are read, with what would fit."""

from __future__ import annotations

import pytest
import torch

from silotune.errors import InputError
from silotune.models.backbone import device, memory
from silotune.models.backbone.device import free_memory, total_memory
from silotune.models.backbone.loading import load_backbone
from silotune.models.backbone.quantization import quantized_shapes, weight_bytes
from silotune.models.backbone.stored_model import weight_files
from tests.support.language_models import folder_of, made

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return weight_files(str(folder_of("llama", tmp_path_factory.mktemp("models"))))


@pytest.fixture
def refusal(files, monkeypatch):
    """`refusal(free)` → the message for a tiny Llama."""

    def message(free: int, dtype=torch.float32, trained=False) -> str:
        monkeypatch.setattr(memory, "free_memory", lambda _: free)
        with pytest.raises(InputError) as refused:
            memory.require_room_for_weights("big", files, model, dtype, [torch.device("cuda:0")], "none", trained)
        return str(refused.value)

    return message


def model():
    return made("llama")[0]


def size(quantization="none", of_a_value=2):
    return weight_bytes(model(), quantization, of_a_value)


def test_stored_values_are_those_of_the_model(files):
    assert memory.stored_values(files) == sum(tensor.numel() for tensor in model().parameters())


def test_what_would_fit_is_named_and_nothing_else(refusal):
    everything = refusal(size())
    assert everything.startswith("backbone: the weights of 'big' take 0.0 GiB, and cuda:0 has 0.0 GiB free; what would")
    assert all(words in everything for words in ("precision=bf16 (", "quantization=int8 (", "quantization=nf4 ("))
    smaller = refusal(size() - 1)
    assert "bf16" not in smaller
    assert "int8" in smaller
    smallest = refusal(size("int8") - 1, torch.bfloat16)
    assert "int8" not in smallest
    assert "nf4" in smallest
    assert "no smaller precision of it would fit; the smallest is" in refusal(1000)
    assert "tuner=full keeps float32" in refusal(size(), trained=True)


def test_weights_that_fit_are_not_refused(files, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: size(of_a_value=4))
    memory.require_room_for_weights("big", files, model, torch.float32, [torch.device("cuda:0")], "none", False)


def test_a_head_that_is_stored_and_not_read_takes_no_room(tmp_path, monkeypatch):
    """A causal model's files hold its head; `head=mlp` loads the transformer alone."""
    folder = str(folder_of("llama", tmp_path))
    head = model().get_output_embeddings().weight
    assert head is not model().get_input_embeddings().weight, "the head has weights of its own"
    monkeypatch.setattr(memory, "free_memory", lambda _: size(of_a_value=4) - head.numel() * 4)
    load_backbone(folder, precision="fp32", device="cpu")
    with pytest.raises(InputError, match=r"take 0\.0 GiB"):
        load_backbone(folder, precision="fp32", device="cpu", model_class="AutoModelForCausalLM")


def test_quantized_layers_are_those_that_loading_quantizes(refusal):
    """Layers are counted by their shapes and scales, whatever their names."""
    layers = quantized_shapes(model(), "int8").values()
    saved = sum(2 * rows * columns - (rows * columns + 4 * rows) for rows, columns in layers)
    assert size("int8") == size() - saved
    assert saved > 0


def test_a_backbone_is_refused_before_it_is_read(backbone_folder, monkeypatch):
    folder = str(backbone_folder("bert"))
    monkeypatch.setattr(memory, "free_memory", lambda _: 4 * memory.stored_values(weight_files(folder)) // 2)
    monkeypatch.setattr("silotune.models.backbone.loading._read", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(InputError, match=r"take .* free; what would fit: precision=bf16"):
        load_backbone(folder, precision="fp32")


def test_the_machine_says_what_it_has():
    assert 2**20 < free_memory(CPU) <= total_memory(CPU) < 2**50


def test_a_containers_memory_is_its_share_of_the_machines(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(device, "_LIMIT", limit)
    machine = total_memory(CPU)
    for text, expected in (("1048576\n", 2**20), ("max\n", machine), (f"{2**60}\n", machine)):
        limit.write_text(text)
        assert total_memory(CPU) == expected
        assert free_memory(CPU) <= expected
