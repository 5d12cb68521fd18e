"""LoRA's variants (rsLoRA, PiSSA, orthogonal starts, DoRA), VeRA and LoHa: states, gradients and starts are peft's."""

from __future__ import annotations

import re

import peft
import pytest
import torch

from silotune.errors import InputError
from silotune.models.tuners import TUNERS, TensorGroup
from silotune.models.tuners.target_modules import layer_weight
from silotune.runs.build.builder import build
from tests.support.tuner_families import (
    batch,
    first_part,
    make_backbone,
    make_model,
    random_part,
    real_states,
    run,
    shared_backbone,
    trainable,
)

RANK, ALPHA = 4, 6.0
LORA = {"r": RANK, "lora_alpha": ALPHA}
VARIANTS = {
    "rslora": ("lora", {"scaling": "rslora"}, peft.LoraConfig, {"use_rslora": True}),
    "orthogonal": ("lora", {"init": "orthogonal"}, peft.LoraConfig, {}),
    "pissa": ("lora", {"init": "pissa"}, peft.LoraConfig, {"init_lora_weights": "pissa"}),
    "dora": ("dora", {}, peft.LoraConfig, {"use_dora": True}),
    "dora, rslora, pissa": (
        "dora",
        {"scaling": "rslora", "init": "pissa"},
        peft.LoraConfig,
        {"use_dora": True, "use_rslora": True, "init_lora_weights": "pissa"},
    ),
    "vera": ("vera", {"seed": 5}, peft.VeraConfig, {"projection_prng_key": 5}),
    "loha": ("loha", {}, peft.LoHaConfig, {}),
}

NONE = ("loha", "gpt2")
"""Peft's LoHa does not know GPT-2's layers."""


def of(variant: str, **more):
    """The variant's tuner, and peft's configuration of it."""
    name, options, config, peft_options = VARIANTS[variant]
    size = {"r": 7} if name == "vera" else {"r": RANK, "alpha": ALPHA}
    tuner = TUNERS[name](TUNERS[name].Options(**size, **options, **more))
    peft_size = {"vera": {"r": 7}, "loha": {"r": RANK, "alpha": ALPHA}}.get(name, LORA)
    return tuner, lambda **given: config(**peft_size, **peft_options, **given)


def in_peft(family, config, part, double=False, **options):
    """A model that peft wraps by itself, with our part's tensors."""
    modules = sorted({re.split(r"\.(?:lora|vera|hada)_", name)[0] for name in part})
    options |= {"save_projection": False} if ".vera_" in next(iter(part)) else {}
    model = make_backbone(family, double=double).base
    options |= {} if ".hada_" in next(iter(part)) else {"fan_in_fan_out": family == "gpt2"}
    model = peft.get_peft_model(model, config(target_modules=modules, **options))
    own = {f"base_model.model.{name}": tensor.detach() for name, tensor in part.items()}
    assert not peft.set_peft_model_state_dict(model, own).unexpected_keys
    return model


def parameter_of(model, name):
    """The parameter of peft's model that has a tensor's name."""
    module, _, last = name.removesuffix(".weight").rpartition(".")
    ending = ".weight" if last.startswith("lora_") else ""
    return model.get_parameter(f"base_model.model.{module}.{last}.default{ending}")


def close(actual, expected, share=2e-6):
    """Float32: two millionths of the largest number."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=share * expected.abs().max().item())


@pytest.mark.parametrize(
    ("variant", "family"),
    [(variant, family) for variant in VARIANTS for family in ("bert", "gpt2", "llama") if (variant, family) != NONE],
)
def test_states_and_gradients_are_those_of_peft(variant, family):
    """Float64, but float32 for PiSSA, which peft does not start in float64."""
    double = "pissa" not in variant
    backbone, inputs = make_backbone(family, double=double), batch(family)
    tuner, config = of(variant)
    part = trainable(random_part(tuner, backbone, spread=0.05))
    model = in_peft(family, config, part, double).to(backbone.device).eval()
    moved = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
    states = torch.cat(real_states(run(backbone, inputs, (tuner, [(part, 1.0)])), inputs))
    expected = torch.cat(real_states(model(**moved).last_hidden_state, inputs))
    assert (states - torch.cat(real_states(run(backbone, inputs), inputs))).abs().max() > 1e-3
    close(states, expected, 1e-11 if double else 2e-6)
    states.square().sum().backward()
    expected.square().sum().backward()
    for name, tensor in part.items():
        close(tensor.grad, parameter_of(model, name).grad, 1e-10 if double else 1e-5)


@pytest.mark.parametrize("variant", ["dora", "vera"])
def test_dropout_in_training_is_that_of_peft(variant):
    backbone, inputs = make_backbone("bert"), batch("bert")
    tuner, config = of(variant, dropout=0.3)
    part = trainable(random_part(tuner, backbone, spread=0.05))
    rate = {"vera_dropout": 0.3} if variant == "vera" else {"lora_dropout": 0.3}
    model = in_peft("bert", config, part, **rate).to(backbone.device).train()
    torch.manual_seed(4)
    states = run(backbone, inputs, (tuner, [(part, 1.0)]))
    torch.manual_seed(4)
    moved = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
    expected = torch.cat(real_states(model(**moved).last_hidden_state, inputs))
    close(torch.cat(real_states(states, inputs)).detach(), expected.detach())
    plain = run(backbone, inputs, (of(variant)[0], [(part, 1.0)]))
    assert (states - plain).abs().max() > 1e-3


def test_pissa_starts_as_in_peft():
    """The same principal part: B·A, and the residual weight that peft puts into its base layer."""
    backbone = make_backbone("bert")
    tuner, config = of("pissa")
    part = tuner.init(backbone, [], torch.Generator())
    modules = tuner.target_modules(part)
    model = peft.get_peft_model(make_model("bert"), config(target_modules=modules))
    for module in modules:
        a, b = part[f"{module}.lora_A.weight"], part[f"{module}.lora_B.weight"]
        layer = model.get_submodule(f"base_model.model.{module}")
        close(b @ a, (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach())
        residual = layer_weight(backbone.module(module)) - ALPHA / RANK * b @ a
        close(residual, layer.base_layer.weight.detach())
        assert torch.linalg.matrix_rank(b) == RANK


def test_dora_starts_as_in_peft():
    backbone = make_backbone("gpt2")
    tuner, config = of("dora")
    part = tuner.init(backbone, [], torch.Generator().manual_seed(1))
    model = in_peft("gpt2", config, {name: tensor for name, tensor in part.items() if "magnitude" not in name})
    for name, tensor in part.items():
        if "magnitude" in name:
            close(tensor, parameter_of(model, name).detach())


@pytest.mark.parametrize("sites", ["query,value", "attention_output,feedforward_input,feedforward_output"])
def test_veras_matrices_are_those_of_peft(sites):
    """Drawn from the same key, for the largest widths, and cut to each module's."""
    backbone = shared_backbone("bert")
    tuner, config = of("vera", sites=sites)
    acting = tuner.effective(backbone, first_part(tuner, backbone))
    modules = tuner.target_modules(acting)
    model = peft.get_peft_model(make_model("bert"), config(target_modules=modules))
    saved = peft.get_peft_model_state_dict(model)
    for module in modules:
        low, wide = (acting[f"{module}.{name}"] for name in ("vera_A", "vera_B"))
        assert torch.equal(low, saved["base_model.vera_A"][:, : low.shape[1]].to(low))
        assert torch.equal(wide, saved["base_model.vera_B"][: len(wide)].to(wide))
    other = TUNERS["vera"](TUNERS["vera"].Options(r=7, sites=sites, seed=6))
    assert not torch.equal(other.effective(backbone, first_part(other, backbone))[f"{modules[0]}.vera_A"], low)


def test_orthogonal_factors_have_no_product():
    """Also where A and B are drawn as parts of their own."""
    backbone, (tuner, _) = shared_backbone("bert"), of("orthogonal")
    part = {}
    for group in "AB":
        part |= TensorGroup(tuner, group).init(backbone, [], torch.Generator().manual_seed(ord(group)))
    for module in tuner.target_modules(part):
        a, b = part[f"{module}.lora_A.weight"], part[f"{module}.lora_B.weight"]
        assert float((b @ a).abs().max()) < 1e-7
        assert min(float(a.abs().max()), float(b.abs().max())) > 0.1


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("lora", {"init": "orthogonal", "r": 3}, "even r"),
        ("lora", {"init": "pissa", "dropout": 0.1}, "dropout: would drop"),
        ("dora", {"init": "pissa", "dropout": 0.1}, "dropout: would drop"),
        ("lora", {"lr_ratio": 0}, "greater than 0"),
    ],
)
def test_options_that_cannot_be(name, options, problem):
    with pytest.raises(ValueError, match=problem):
        TUNERS[name].Options(**options)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("flora", "tuner.init=pissa"), "method flora draws the adapter anew after every round"),
        (("fedavg", "tuner=lora", "tuner.init=pissa", "start=PATH"), "start: a run starts as this LoRA or"),
        (("fedavg", "tuner=dora", "start=PATH"), "start: .* is a LoRA, the run's tuner is dora; allowed: tuner=lora$"),
        (("fedavg", "tuner=lora", "tuner.init=pissa", "tuner.ranks.alpha=2"), "ranks: a start cut to another rank"),
        *(
            (
                (method, "train.keep_optimizer=true"),
                f"train.keep_optimizer: {changed} begins every round with new factors",
            )
            for method, changed in {
                "flexlora": "aggregation=flexlora",
                "fedsvd": "aggregation=fedsvd",
                "flora": "method flora",
            }.items()
        ),
    ],
)
def test_runs_that_cannot_be(words, problem, tiny_config, tmp_path):
    with pytest.raises(InputError, match=problem) as refused:
        build(tiny_config(*(word.replace("PATH", str(tmp_path)) for word in words)))
    assert "\n" not in str(refused.value)


def test_pissa_refuses_more_ranks_than_the_weight_has():
    tuner = TUNERS["lora"](TUNERS["lora"].Options(r=99, init="pissa"))
    with pytest.raises(InputError, match=r"^tuner\.r: 99 singular values of .*has 24; allowed: up to that"):
        first_part(tuner, shared_backbone("bert"))
