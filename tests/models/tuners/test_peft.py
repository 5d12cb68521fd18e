"""The same tensors, under the names peft uses, give the same states in plain peft: an export is a renaming."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM

from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import TUNERS
from tests.support.tuner_families import (
    CONFIGS,
    LAYERS,
    batch,
    make_backbone,
    make_model,
    make_tuner,
    random_part,
    real_states,
    run,
)

FAMILIES = ("bert", "roberta", "electra", "gpt2", "llama", "qwen3", "mistral", "t5")


def reloaded(model, config, tensors, folder):
    """The model with the tensors as a peft adapter, saved to a folder and loaded by peft."""
    config.save_pretrained(folder)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return peft.PeftModel.from_pretrained(model, folder).eval()


def states_of(model, inputs):
    with torch.no_grad():
        output = model(**inputs)
    # a decoder behind an encoder is asked for its own states
    return real_states(output.last_hidden_state.cpu(), inputs)


def close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def ours(backbone, tuner, part, inputs):
    with torch.no_grad():
        return real_states(run(backbone, inputs, (tuner, [(part, 1.0)])).cpu(), inputs)


def without_segments(inputs):
    """peft drops segments for models without a head; ours are then all 0 too."""
    return {name: tensor for name, tensor in inputs.items() if name != "token_type_ids"}


@pytest.mark.parametrize("family", [*FAMILIES, "distilbert", "mpnet", "deberta-v2", "modernbert", "qwen2"])
def test_lora(family, tmp_path):
    backbone, inputs = make_backbone(family), batch(family)
    sites = "query,key,value,attention_output,feedforward_input,feedforward_output"
    tuner = TUNERS["lora"](TUNERS["lora"].Options(r=3, alpha=5.0, sites=sites))
    part = random_part(tuner, backbone, spread=0.1)
    modules = sorted({name.split(".lora_")[0] for name in part})
    config = peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=modules, fan_in_fan_out=family == "gpt2")
    named = {f"base_model.model.{name}": tensor for name, tensor in part.items()}
    model = reloaded(make_model(family), config, named, tmp_path)
    actual = ours(backbone, tuner, part, inputs)
    assert max(states.abs().max().item() for states in actual) < 30, "an absolute tolerance would mean nothing"
    close(actual, states_of(model, inputs))


@pytest.mark.parametrize("family", [*FAMILIES, "distilbert", "mpnet", "deberta-v2", "modernbert", "qwen2"])
def test_ia3(family, tmp_path):
    backbone, inputs, tuner = make_backbone(family), batch(family), make_tuner("ia3")
    part = random_part(tuner, backbone)
    modules = [name.removesuffix(".ia3_l") for name in part]
    scaled_inputs = [name.removesuffix(".ia3_l") for name, tensor in part.items() if tensor.shape[0] == 1]
    config = peft.IA3Config(target_modules=modules, feedforward_modules=scaled_inputs, fan_in_fan_out=family == "gpt2")
    named = {f"base_model.model.{name}": tensor for name, tensor in part.items()}
    model = reloaded(make_model(family), config, named, tmp_path)
    close(ours(backbone, tuner, part, inputs), states_of(model, inputs))


PROMPTS = [(family, "prompt") for family in FAMILIES if family not in ("electra", "t5")]
PROMPTS += [("bert", "p-tuning"), ("bert", "p-tuning-mlp")]


@pytest.mark.parametrize(("family", "kind"), PROMPTS)
def test_prompt_and_p_tuning(family, kind, tmp_path):
    """(ELECTRA's word embeddings are narrower than its states, which peft does not provide for.)"""
    backbone, inputs, tuner = make_backbone(family), without_segments(batch(family)), make_tuner(kind)
    part = random_part(tuner, backbone)
    kinds = {"prompt": peft.PromptTuningConfig, "p-tuning": peft.PromptEncoderConfig}
    options = {} if kind == "prompt" else {"encoder_hidden_size": 5}
    config = kinds[kind.removesuffix("-mlp")](num_virtual_tokens=3, task_type="FEATURE_EXTRACTION", **options)
    model = reloaded(make_model(family), config, tuner.reparametrize(part), tmp_path)
    with torch.no_grad():
        states = model(**inputs).last_hidden_state.cpu()
    # in peft a prompt's positions have states; the padding is on the right, so the text's come right behind them
    expected = [row[3 : 3 + int(real)] for row, real in zip(states, inputs["attention_mask"].sum(1), strict=True)]
    close(ours(backbone, tuner, part, inputs), expected)


PREFIXES = [*((family, "prefix-direct") for family in FAMILIES if family != "t5"), ("bert", "prefix")]


@pytest.mark.parametrize(("family", "kind"), PREFIXES)
def test_prefix(family, kind, tmp_path):
    backbone, inputs, tuner = make_backbone(family), without_segments(batch(family)), make_tuner(kind)
    part = random_part(tuner, backbone)
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION")
    model = reloaded(make_model(family), config, tuner.reparametrize(part), tmp_path)
    close(ours(backbone, tuner, part, inputs), states_of(model, inputs))


@pytest.mark.parametrize("kind", ["prompt", "p-tuning", "prefix-direct"])
def test_t5_generates_the_same_scores(kind, tmp_path):
    """peft puts T5's prompt before the encoder's text, and its prefix into the decoder's self-attention."""
    inputs, tuner = batch("t5"), make_tuner(kind)
    backbone = _t5()
    part = random_part(tuner, backbone)
    configs = {
        "prompt": peft.PromptTuningConfig,
        "p-tuning": peft.PromptEncoderConfig,
        "prefix": peft.PrefixTuningConfig,
    }
    options = {"encoder_hidden_size": 5} if kind == "p-tuning" else {}
    config = configs[kind.removesuffix("-direct")](num_virtual_tokens=3, task_type="SEQ_2_SEQ_LM", **options)
    tensors = dict(tuner.reparametrize(part))
    if kind == "prefix-direct":  # peft cuts two copies of the layers into fours: layer i gets those of layer 2i mod n
        split = part["prompt_embeddings"].view(3, LAYERS, -1)
        part = {"prompt_embeddings": split[:, [2 * layer % LAYERS for layer in range(LAYERS)]].flatten(1)}
    else:  # peft holds a second prompt for the decoder, and does not use it
        tensors["prompt_embeddings"] = torch.cat([tensors["prompt_embeddings"]] * 2)
    model = reloaded(_t5().model, config, tensors, tmp_path)
    with torch.no_grad():
        expected = model(**inputs).logits
        states = run(backbone, inputs, (tuner, [(part, 1.0)]))
        actual = backbone.model.lm_head(states * backbone.base.config.d_model**-0.5)
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=1e-5)


def test_segments_of_a_pair_stay_with_their_tokens(tmp_path):
    """peft keeps segments for classifiers: prompt tokens get segment 0."""
    backbone, inputs, tuner = make_backbone("bert"), batch("bert"), make_tuner("prompt")
    part = random_part(tuner, backbone)
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS")
    classifier = _bert_classifier()
    head = {f"base_model.classifier.{name}": tensor for name, tensor in classifier.classifier.state_dict().items()}
    model = reloaded(classifier, config, part | head, tmp_path)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states[-1]
    expected = [row[3 : 3 + int(real)] for row, real in zip(expected, inputs["attention_mask"].sum(1), strict=True)]
    close(ours(backbone, tuner, part, inputs), expected)


def _bert_classifier():
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(CONFIGS["bert"]())
    model.config._attn_implementation = "eager"
    missing, unexpected = model.bert.load_state_dict(make_model("bert").state_dict(), strict=False)
    assert not unexpected
    assert not missing
    return model.eval()


def _t5() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForSeq2SeqLM.from_config(CONFIGS["t5"](), attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return Backbone(model, make_backbone("bert").tokenizer)
