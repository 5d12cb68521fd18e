"""Quantized layers: which they are, what they hold, and that every tuner acts on them exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from silotune.core.randomness import generator
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.block_devices import BlockDevices
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.loading import silence_transformers
from silotune.models.backbone.quantization import (
    QUANTIZATIONS,
    is_quantized,
    quantized_loading,
    quantized_shapes,
    resolve_quantization,
    settle,
    weight_bytes,
)
from silotune.models.tuners import TUNERS
from silotune.models.tuners.base import WeightedTensors
from tests.support.small_runs import save_model

CPU = torch.device("cpu")
TASK = Task("task", ("no", "yes"))
TUNED = [name for name in TUNERS if name != "full"]
CLASSES = {"plain": AutoModel, "causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
FAMILIES = {"bert": "plain", "llama": "causal", "gpt2": "causal", "t5": "seq2seq"}
silence_transformers()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`models(family, quantization, dtype)` → a tiny model; `none` is the plain one."""
    folders = {}

    def load(family, quantization="none", dtype=torch.float32):
        kind = FAMILIES[family]
        if family not in folders:
            folders[family] = save_model(family, kind, tmp_path_factory.mktemp(family))
        options = {} if quantization == "none" else quantized_loading(quantization, dtype, CPU)
        model = CLASSES[kind].from_pretrained(folders[family], dtype=dtype, attn_implementation="eager", **options)
        if options:
            settle(model, family, quantization)
        return model.requires_grad_(False), AutoTokenizer.from_pretrained(folders[family])

    return load


def backbone_of(loaded):
    return Backbone(*loaded, precision="fp32", devices=BlockDevices(CPU))


def held_bytes(layer):
    """Bytes of a quantized layer's weight and scales, wherever its library keeps them."""
    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        tensors = [weight, weight.quant_state.absmax]
    elif type(weight).__name__ == "Int8Params":
        tensors = [weight, layer.state.SCB if weight.SCB is None else weight.SCB]
    else:
        tensors = [weight.qdata, weight.scale, weight.zero_point]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_bytes_follow_from_shapes(models, family, quantization):
    plain = models(family)[0]
    if (family, quantization) == ("gpt2", "int8-torchao"):
        with pytest.raises(
            InputError, match="'gpt2' has no linear layer that torchao can quantize; allowed: none, int8"
        ):
            models(family, quantization)
        return
    quantized = models(family, quantization)[0]
    found = {name: layer for name, layer in quantized.named_modules() if is_quantized(layer)}
    expected = quantized_shapes(plain, quantization)
    assert {name: (layer.out_features, layer.in_features) for name, layer in found.items()} == expected
    assert len(found) >= 12
    assert not is_quantized(quantized.get_output_embeddings() or nn.Linear(1, 1))
    held = sum(held_bytes(layer) for layer in found.values())
    others = {id(p): p for n, p in quantized.named_parameters() if n.removesuffix(".weight") not in found}
    assert weight_bytes(plain, quantization, 4) == held + sum(p.nbytes for p in others.values())
    assert weight_bytes(plain, "none", 2) == 2 * sum(p.numel() for p in plain.parameters())


def dequantized(models, family, quantization):
    """The plain model with the values that the quantized one's weights stand for."""
    import bitsandbytes.functional

    plain, quantized = models(family), models(family, quantization)
    for name, layer in quantized[0].named_modules():
        if is_quantized(layer):
            weight, target = layer.weight, plain[0].get_submodule(name)
            if quantization == "nf4":
                values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            else:
                values = weight.dequantize()
            target.weight.copy_(values.t() if type(target).__name__ == "Conv1D" else values)
    return backbone_of(plain), backbone_of(quantized)


def part_of(backbone, tuner):
    """A part whose every tensor has an effect."""
    made = TUNERS[tuner](TUNERS[tuner].Options(**TUNERS[tuner].example))
    tensors = made.init(backbone, [TASK], generator(1, "init", "part"))
    moved = generator(2, "moved")
    return made, {name: t + 0.1 * torch.randn(t.shape, generator=moved) for name, t in tensors.items()}


def states_and_gradients(backbone, made, tensors):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    plan = ForwardPlan()
    made.act(backbone, [WeightedTensors(leaves, 1.0)], plan)
    ids = torch.arange(5, 17).reshape(2, 6)
    states = backbone.encode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, plan)
    gradients = torch.autograd.grad(states.tanh().mean(), list(leaves.values()), allow_unused=True)
    return states.detach(), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("quantization", ["nf4", "int8-torchao"])
@pytest.mark.parametrize("tuner", TUNED)
def test_tuners_act_on_quantized_layers_as_on_their_values(models, tuner, quantization):
    family = "bert" if tuner == "bitfit" else "llama"
    values, backbone = dequantized(models, family, quantization)
    made, tensors = part_of(values, tuner)
    own = made.init(backbone, [TASK], generator(1, "init", "part"))
    assert {name: tensor.shape for name, tensor in own.items()} == {n: t.shape for n, t in tensors.items()}
    expected, wanted = states_and_gradients(values, made, tensors)
    actual, gradients = states_and_gradients(backbone, made, tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=2e-3, atol=1e-6, msg=name)
    plain = backbone.encode({"input_ids": torch.arange(5, 17).reshape(2, 6)}, ForwardPlan())
    assert (actual - plain).abs().max() > 0.01


@pytest.mark.parametrize("tuner", TUNED)
def test_tuners_act_on_int8_layers(models, tuner):
    """LLM.int8() rounds activations too: its own layers stand beside the tuner's formula, applied by hand."""
    family = "bert" if tuner == "bitfit" else "llama"
    backbone, plain = backbone_of(models(family, "int8")), backbone_of(models(family))
    made, tensors = part_of(backbone, tuner)
    expected, wanted = states_and_gradients(plain, made, tensors)
    actual, gradients = states_and_gradients(backbone, made, tensors)
    scale = expected.std()
    assert (actual - expected).abs().mean() < 0.1 * scale
    for name, gradient in gradients.items():
        if wanted[name] is not None and wanted[name].abs().max() > 1e-5:
            assert nn.functional.cosine_similarity(gradient.flatten(), wanted[name].flatten(), 0) > 0.8, name


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gradients_are_the_same_after_an_evaluation(models, quantization):
    backbone = backbone_of(models("llama", quantization))
    made, tensors = part_of(backbone, "lora")
    states, before = states_and_gradients(backbone, made, tensors)
    with torch.no_grad():
        backbone.encode({"input_ids": torch.arange(5, 17).reshape(2, 6)}, ForwardPlan())
    again, after = states_and_gradients(backbone, made, tensors)
    assert torch.equal(states, again)
    assert all(torch.equal(before[name], after[name]) and before[name].abs().max() > 0 for name in before)


def test_int8_layers_keep_no_input_of_a_frozen_weight(models):
    model = models("llama", "int8")[0]
    layer = next(layer for layer in model.modules() if is_quantized(layer))
    x = torch.randn(2, 3, layer.in_features, requires_grad=True)
    output = layer(x)
    assert output.grad_fn.tensors == (None, None, None)
    bare = copy.deepcopy(layer)
    bare._forward_hooks.clear()
    kept = bare(x)
    assert kept.grad_fn.tensors[2] is not None  # what the library keeps without the hook
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (output, kept)))


def test_auto_is_int8_on_cuda_and_none_elsewhere():
    assert resolve_quantization("auto", torch.device("cuda:1")) == "int8"
    assert resolve_quantization("auto", CPU) == "none"
    assert resolve_quantization("nf4", CPU) == "nf4"
