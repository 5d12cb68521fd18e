"""Families of language models × features: checkpointing, shared views, cohorts, generation equal to `generate`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    SiglipVisionConfig,
)

from silotune.config import BackboneConfig
from silotune.errors import InputError
from silotune.interop.adapters import load_plain
from silotune.models.backbone.architectures import ARCHITECTURES
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.loading import load_backbone
from silotune.models.forward.generation import GenerationOptions, generate_ids
from silotune.models.forward.mixing import MixEntry
from silotune.models.tuners import TUNERS
from silotune.models.tuners.full import _WITH_BIASES
from silotune.models.tuners.target_modules import is_linear
from tests.support.decoder_families import CONFIGS, EXPERTS, HYBRID, backbone_of, language_model, tokenizer
from tests.support.language_models import generated
from tests.support.views import encoded_cohort, encoded_views

QUICK = ("gemma3_text", "phi3", "mixtral", "qwen3_next", "granitemoehybrid")
every_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in CONFIGS]
)

TUNED = {
    "lora": {"r": 3, "alpha": 6},
    "bottleneck": {"r": 3},
    "ia3": {},
    "bitfit": {},
    "prefix": {"tokens": 3, "reparametrise": 0},
    "prompt": {"tokens": 3},
}
every_tuner = pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[] if name == "lora" else [pytest.mark.long]) for name in TUNED]
)


def has_biases(model):
    """Whether any linear layer or layer norm has one; Mamba's convolutions, which BitFit leaves, do."""
    layers = (module for module in model.modules() if is_linear(module) or isinstance(module, nn.LayerNorm))
    return any(getattr(layer, "bias", None) is not None for layer in layers)


@pytest.mark.long
def test_bitfit_names_the_families_that_have_biases():
    """By the defaults of their configurations, on a device without memory."""
    named = []
    for family in ARCHITECTURES:
        with torch.device("meta"):
            named += [family] if has_biases(AutoModel.from_config(CONFIG_MAPPING[family]())) else []
    assert ", ".join(sorted(named)) == _WITH_BIASES


def parts_of(backbone, kind, family, seeds=(1, 2)):
    """The tuner, and trained parts of it; skips what a family has not."""
    options = TUNED[kind]
    if family in EXPERTS and kind == "bottleneck":
        options = options | {"sites": "attention_output"}
    if family in EXPERTS and kind == "ia3":
        options = options | {"sites": "key,value", "feedforward": "attention_output"}
    tuner = TUNERS[kind](TUNERS[kind].Options(**options))
    if kind == "prefix" and family in HYBRID:
        pytest.skip("no prefixes")
    if kind == "bitfit" and not has_biases(backbone.base):
        pytest.skip("no biases")
    dtype = backbone.word_embeddings.dtype
    parts = []
    for seed in seeds:
        draws = torch.Generator().manual_seed(seed)
        initial = tuner.init(backbone, [], draws)
        moved = {name: tensor + 0.2 * torch.randn(tensor.shape, generator=draws) for name, tensor in initial.items()}
        parts.append({name: tensor.to(dtype).requires_grad_() for name, tensor in moved.items()})
    return tuner, parts


def inputs_of(lengths, side="right", seed=0):
    draws = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.int64), torch.zeros(len(lengths), longest).long()
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(longest - length, longest)
        ids[row, where] = torch.randint(5, len(tokenizer()), (length,), generator=draws)
        mask[row, where] = 1
    return {"input_ids": ids, "attention_mask": mask}


def total(actual, inputs):
    """A number to which every real token contributes."""
    real = inputs["attention_mask"].unsqueeze(-1)
    return sum((n + 1) * (states * real).square().sum() for n, states in enumerate(actual.values()))


def gradients(actual, inputs, leaves):
    return torch.autograd.grad(total(actual, inputs), leaves, allow_unused=True)


def assert_near(found, expected, tolerance):
    largest = max(float(tensor.abs().max()) for tensor in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * largest)


def saved_bytes(backbone, run):
    """Return the result of `run`, and the bytes that its graph keeps for the backward pass, weights apart."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in backbone.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return result, sum(kept.values())


# -- gradient checkpointing --------------------------------------------------------------------------------------------


@every_tuner
@every_family
def test_checkpointing_keeps_less_and_gives_the_same_gradients(family, kind):
    inputs, found = inputs_of((20, 9, 14, 20)), []
    for backbone in (backbone_of(family), backbone_of(family, checkpointing=True)):
        tuner, parts = parts_of(backbone, kind, family)
        mixes = {number: [MixEntry(tuner, part, 1)] for number, part in enumerate(parts)}
        actual, kept = saved_bytes(backbone, lambda b=backbone, m=mixes: encoded_views(b, inputs, m))
        leaves = [tensor for part in parts for tensor in part.values()]
        found.append((gradients(actual, inputs, leaves), kept))
    (expected, whole), (again, less) = found
    assert less < 0.5 * whole
    assert_near(again, expected, 1e-5)


# -- shared views and cohorts ------------------------------------------------------------------------------------------


@every_tuner
@every_family
def test_views_together_are_views_one_by_one(family, kind):
    backbone = backbone_of(family)
    tuner, (one, other) = parts_of(backbone, kind, family)
    mixes = {
        "both": [MixEntry(tuner, one, 0.5), MixEntry(tuner, other, 0.5)],
        "one": [MixEntry(tuner, one, 1)],
        "other": [MixEntry(tuner, other, 1)],
        "base": [],
    }
    for side, lengths in (("right", (11, 5, 8)), ("left", (6, 9, 3)), ("right", (7,))):
        inputs = inputs_of(lengths, side)
        alone = {name: encoded_views(backbone, inputs, {name: mix})[name] for name, mix in mixes.items()}
        together = encoded_views(backbone, inputs, mixes)
        real = inputs["attention_mask"] == 1
        for name, states in alone.items():
            torch.testing.assert_close(together[name][real], states[real], rtol=1e-4, atol=1e-4)
        leaves = [*one.values(), *other.values()]
        assert_near(gradients(together, inputs, leaves), gradients(alone, inputs, leaves), 1e-4)
    assert (together["one"] - together["other"]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["lora", pytest.param("bottleneck", marks=pytest.mark.long)])
@every_family
def test_silos_together_are_silos_alone(family, kind):
    backbone = backbone_of(family)
    tuner, parts = parts_of(backbone, kind, family)
    lengths = [(9, 4), (7, 6, 3)]
    mixes = [{"own": [MixEntry(tuner, part, 1)], "base": []} for part in parts]
    expected = [
        (inputs, encoded_views(backbone, inputs, mix))
        for inputs, mix in ((inputs_of(own, seed=silo), mixes[silo]) for silo, own in enumerate(lengths))
    ]
    width = max(max(own) for own in lengths)
    whole = {
        name: torch.cat(
            [torch.nn.functional.pad(inputs[name], (0, width - inputs[name].shape[1])) for inputs, _ in expected]
        )
        for name in ("input_ids", "attention_mask")
    }
    actual = encoded_cohort(backbone, [inputs for inputs, _ in expected], whole, mixes)
    for silo, (inputs, alone) in enumerate(expected):
        own = {name: states[:, : inputs["input_ids"].shape[1]] for name, states in actual[silo].items()}
        leaves = [*parts[silo].values()]
        theirs = gradients(alone, inputs, leaves)
        found = torch.autograd.grad(total(own, inputs), leaves, retain_graph=True)
        assert_near(found, theirs, 1e-4)


# -- generation --------------------------------------------------------------------------------------------------------

TEXTS = ["the garden was", "say it: the soup felt cold again and", "a", "perhaps the winter"]


@cache
def prompts():
    return [tokenizer()(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.long)])
@every_family
def test_answers_are_transformers_own(family, beams):
    answers = generate_ids(backbone_of(family), prompts(), [], GenerationOptions(beams, 10), rows_at_once=4)
    assert answers == [generated(language_model(family), prompt, 10, beams) for prompt in prompts()]
    assert len({*map(tuple, answers)}) > 1


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[] if name in ("lora", "prompt") else [pytest.mark.long]) for name in TUNED]
)
@every_family
def test_with_a_cache_answers_are_those_without(family, kind):
    backbone = backbone_of(family)
    tuner, (part, _) = parts_of(backbone, kind, family)
    mix = [MixEntry(tuner, {name: tensor.detach() for name, tensor in part.items()}, 1.0)]
    answers = generate_ids(backbone, prompts(), mix, GenerationOptions(1, 6), rows_at_once=4)
    for prompt, answer in zip(prompts(), answers, strict=True):
        written: list[int] = []
        with torch.no_grad():
            while len(written) < 6:
                ids = torch.tensor([[*prompt, *written]])
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                states = encoded_views(backbone, inputs, {"view": mix})["view"]
                written.append(int(backbone.lm_head(states[0, -1]).argmax()))
                if written[-1] == 2:
                    written.pop()
                    break
        assert answer == written


# -- prompts in embeddings that the model scales, and refusals ---------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_a_prompt_of_words_is_the_words(family):
    """A prompt initialised with a text's words equals that text before the row, where embeddings are scaled, too."""
    backbone = backbone_of(family)
    tuner = TUNERS["prompt"](TUNERS["prompt"].Options(tokens=3, init="words", words="the warm soup"))
    part = tuner.init(backbone, [], torch.Generator())
    words = tokenizer()("the warm soup", add_special_tokens=False)["input_ids"][:3]
    inputs = inputs_of((6,))
    ids = torch.cat([torch.tensor([words]), inputs["input_ids"]], 1)
    with torch.no_grad():
        states = encoded_views(backbone, inputs, {"view": [MixEntry(tuner, part, 1.0)]})["view"]
        expected = backbone.base(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[:, 3:]
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("kind", ["bottleneck", "ia3"])
def test_tuners_inside_experts_are_refused(family, kind):
    tuner = TUNERS[kind](TUNERS[kind].Options())
    with pytest.raises(InputError, match=rf"^tuner\.sites: {kind} finds no linear layer for 'feedforward.*{family}"):
        tuner.init(backbone_of(family), [], torch.Generator())


def test_a_head_that_cannot_run_alone_is_refused_before_training(tmp_path):
    language_model("opt").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"^backbone: .* is of type 'opt', whose language-model head is not supported"):
        load_backbone(str(tmp_path), precision="fp32", model_class="AutoModelForCausalLM")


_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4}


def _whole(family):
    """A model of several modalities whose text part is of this family."""
    text = CONFIGS[family](vocab_size=len(tokenizer()), pad_token_id=0).to_dict()
    if family == "gemma3_text":
        kind, vision = Gemma3ForConditionalGeneration, SiglipVisionConfig(**_VISION)
        config = Gemma3Config(text_config=text, vision_config=vision.to_dict(), mm_tokens_per_image=4)
    elif family == "llama":
        kind, vision = LlavaForConditionalGeneration, CLIPVisionConfig(**_VISION)
        config = LlavaConfig(text_config=text, vision_config=vision.to_dict())
    else:
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24}
        kind, config = Qwen3_5ForConditionalGeneration, Qwen3_5Config(text_config=text, vision_config=vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return kind(config).eval()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text", "llama"])
def test_of_a_model_of_several_modalities_the_text_part_is_read(family, tmp_path):
    model, ids = _whole(family), torch.tensor([[5, 6, 7, 8, 9]])
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path), precision="fp32", device="cpu", model_class="AutoModelForCausalLM")
    assert backbone.model_type == family
    with torch.no_grad():
        states = backbone.encode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ForwardPlan())
        torch.testing.assert_close(backbone.lm_head(states), model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    merged = load_plain(BackboneConfig(name=str(tmp_path)), "AutoModelForCausalLM")
    merged.save_pretrained(tmp_path / "alone")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    assert again.config.model_type == family
    torch.testing.assert_close(again(input_ids=ids).logits, backbone.lm_head(states), rtol=1e-4, atol=1e-5)
    alone = load_backbone(str(tmp_path), precision="fp32", device="cpu")
    torch.testing.assert_close(alone.base(input_ids=ids).last_hidden_state, states, rtol=1e-4, atol=1e-5)
