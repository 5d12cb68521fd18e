"""Exports of runs over a quantized backbone: adapters open over the same quantized base, `merged` is not quantized."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, BitsAndBytesConfig, TorchAoConfig

from silotune.interop.adapters import fold_in
from silotune.interop.export import export
from silotune.interop.selection import select
from silotune.models.backbone.quantization import is_quantized
from tests.support.small_runs import PAIRS, carried_along, own_states, rows_of, states_of

CONFIGURATIONS = {"int8": {"load_in_8bit": True}, "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}


def run_of(runs, quantization, tuner="lora"):
    return runs.run("llama", tuner, f"backbone.quantization={quantization}")


def as_in_training(model):
    """Leave out the kernel that bitsandbytes takes for predictions on some CPUs: it computes in bf16."""
    for layer in model.modules():
        if is_quantized(layer):
            layer.support_avx512bf16_for_cpu = False
    return model.eval()


@pytest.mark.parametrize(
    ("quantization", "tuner"),
    [
        *(("nf4", tuner) for tuner in ("lora", "dora", "prompt")),
        ("int8", "lora"),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("nf4", "vera"), ("nf4", "ia3"), ("int8", "dora"))),
    ],
)
def test_plain_peft_over_the_same_quantized_base(runs, quantization, tuner, tmp_path):
    run = run_of(runs, quantization, tuner)
    about = export(run.model("beta"), "global", tmp_path / "out")
    assert (about["trained_over"], about["quantization"]["quant_method"]) == (quantization, "bitsandbytes")
    settings = BitsAndBytesConfig(**CONFIGURATIONS[quantization])
    base = AutoModel.from_pretrained(runs.model("llama"), dtype=torch.float32, quantization_config=settings)
    model = as_in_training(peft.PeftModel.from_pretrained(base, tmp_path / "out"))
    actual, expected = states_of(model, tmp_path / "out"), own_states(run, "beta", {"global": 1}, PAIRS)
    # int8 finds outliers in all rows of a forward, and these are rows together against rows one by one
    tolerance = 1e-4 if quantization == "nf4" else 0.1
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    without = own_states(run, "beta", {}, PAIRS)
    assert max((one - other).abs().max() for one, other in zip(actual, without, strict=True)) > 2 * tolerance


@pytest.mark.parametrize("quantization", ["nf4", "int8-torchao"])
def test_the_copied_loader_quantizes_as_training_did(runs, quantization, tmp_path):
    run = run_of(runs, quantization, "bottleneck")
    export(run.model("beta"), "global", tmp_path / "out")
    model = carried_along(tmp_path / "out").load(tmp_path / "out")
    as_in_training(model.model)
    assert any(map(is_quantized, model.model.modules()))
    states, mask = model.states(PAIRS)
    for one, other in zip(rows_of(states, mask), own_states(run, "beta", {"global": 1}, PAIRS), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_merged_is_the_stored_model_with_the_adapter_folded_in(runs, tmp_path):
    run = run_of(runs, "nf4")
    about = export(run.model("beta"), "merged", tmp_path / "out")
    assert (about["trained_over"], about["quantization"]) == ("nf4", None)
    expected = AutoModel.from_pretrained(runs.model("llama"), dtype=torch.float32)
    adapter = export(run.model("beta"), "global", tmp_path / "adapter")
    assert adapter["tuner"]["r"] == 3
    selection = select(run.model("beta"), "merged")
    fold_in(expected, selection.model.tuner, selection.adapter)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.state_dict().items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The base model was quantized in training (nf4); here the adapter is folded into the weights" in card


def test_the_card_loads_the_base_quantized(runs, tmp_path):
    export(run_of(runs, "int8-torchao").model("beta"), "global", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("FOLDER", str(tmp_path / "out"))
    made = {}
    exec(code, made)
    assert isinstance(made["quantization"], TorchAoConfig)
    assert isinstance(made["model"], peft.PeftModel)
    assert any(map(is_quantized, made["model"].modules()))
    assert json.loads((tmp_path / "out" / "export.json").read_text())["trained_over"] == "int8-torchao"
