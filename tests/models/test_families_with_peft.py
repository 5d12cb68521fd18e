"""LoRA on every layer of today's decoders, experts and recurrent mixers too, is that of transformers and peft."""

from __future__ import annotations

import copy
import json

import peft
import pytest
import torch
import yaml
from safetensors.torch import save_file

from silotune.errors import InputError
from silotune.interop.adapters import fold_in, peft_layout
from silotune.models.forward.generation import GenerationOptions, generate_ids
from silotune.models.forward.mixing import MixEntry
from silotune.models.tuners import TUNERS, Delta
from silotune.models.tuners.base import MergedAdapter
from silotune.models.tuners.part_modules import TokenMixer
from silotune.models.tuners.target_modules import is_linear
from tests.support.chats import conversations, write_lines
from tests.support.decoder_families import EXPERTS, HYBRID, backbone_of, language_model, tokenizer
from tests.support.language_models import generated
from tests.support.views import encoded_views

FIELDS = "query,key,value,attention_output,feedforward_input,feedforward_gate,feedforward_output"
MIXERS = {"bamba": "mamba.in_proj", "granitemoehybrid": "mamba.in_proj"} | dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text"), "in_proj_z,in_proj_a,in_proj_b"
)
FAMILIES = [*dict.fromkeys([*EXPERTS, *HYBRID, "gemma3_text"])]


def tuned(name: str, **options):
    return TUNERS[name](TUNERS[name].Options(**options))


def lora(sites: str, **options):
    return tuned("lora", r=3, alpha=6, sites=sites, **options)


def moved_part(tuner, backbone, seed: int = 3):
    draws = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=draws)
        for name, tensor in tuner.init(backbone, [], draws).items()
    }


def with_peft(family: str, tuner, part, folder):
    """The plain model under the adapter as exports write it."""
    adapter = MergedAdapter(part, tuner.options_of(part))
    layout = peft_layout(backbone_of(family), tuner, adapter, "base", "AutoModelForCausalLM")
    folder.mkdir()
    (folder / layout.config_file).write_text(json.dumps(layout.config))
    save_file({name: tensor.contiguous() for name, tensor in layout.tensors.items()}, folder / layout.tensor_file)
    return peft.PeftModel.from_pretrained(copy.deepcopy(language_model(family)), folder, is_trainable=True).eval()


def assert_near(found, expected, tolerance):
    """Compare within a tolerance of the largest number: recurrent layers amplify rounding."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def padded():
    ids = torch.randint(5, len(tokenizer()), (3, 11), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(11) < torch.tensor([[11], [6], [9]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "scaling"),
    [*((family, "standard") for family in FAMILIES), ("mixtral", "rslora"), ("gemma3_text", "rslora")],
)
def test_states_gradients_and_answers(family, scaling, tmp_path):
    sites = ",".join(filter(None, [FIELDS, MIXERS.get(family)]))
    backbone, tuner = backbone_of(family), lora(sites, scaling=scaling)
    part = moved_part(tuner, backbone)
    modules = tuner.target_modules(part)
    assert backbone.experts <= {*modules}
    assert bool(backbone.experts) is (family in EXPERTS)
    blocks = [name for name, module in backbone.base.named_modules() if is_linear(module) and ".layers." in f".{name}"]
    left = {name.split(".", 2)[2] for name in blocks} - {name.split(".", 2)[2] for name in modules}
    assert not {name for name in left if "shared_expert" not in name and "in_proj" not in name}
    model = with_peft(family, tuner, part, tmp_path / "adapter")
    inputs = padded()
    real = inputs["attention_mask"] == 1
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in part.items()}
    states = encoded_views(backbone, inputs, {"view": [MixEntry(tuner, leaves, 1.0)]})["view"]
    logits, expected = backbone.lm_head(states)[real], model(**inputs).logits[real]
    assert_near(logits, expected, 1e-4)
    with torch.no_grad():
        without = backbone.lm_head(encoded_views(backbone, inputs, {"view": []})["view"])[real]
    assert (logits - without).abs().max() > 1e-2
    logits.square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: tensor.grad for name, tensor in leaves.items()}
    layout = peft_layout(backbone, tuner, MergedAdapter(gradients, tuner.options_of(part)), "", "AutoModelForCausalLM")
    theirs = {name.replace(".default", ""): tensor.grad for name, tensor in model.named_parameters()}
    for name, gradient in layout.tensors.items():
        assert_near(gradient, theirs[name], 1e-3)
    prompts = [tokenizer()(text)["input_ids"] for text in ("the garden was", "a", "say it: the soup felt cold")]
    answers = generate_ids(backbone, prompts, [MixEntry(tuner, part, 1.0)], GenerationOptions(1, 6), rows_at_once=3)
    assert answers == [generated(model, prompt, 6) for prompt in prompts]
    merged = copy.deepcopy(language_model(family))
    fold_in(merged, tuner, MergedAdapter(part, tuner.options_of(part)))
    assert_near(merged(**inputs).logits[real], expected, 1e-4)


def test_mixes_and_ranks_of_experts(tmp_path):
    backbone, tuner = backbone_of("mixtral"), lora(FIELDS)
    one, other = moved_part(tuner, backbone, 1), moved_part(tuner, backbone, 2)
    assert not tuner.mixes_rows(backbone)
    assert lora("query,value").mixes_rows(backbone)
    mix = [MixEntry(tuner, one, 0.25), MixEntry(tuner, other, 0.75)]
    merged = tuner.merge(mix)
    assert merged.options["r"] == 6
    inputs = padded()
    with torch.no_grad():
        states = encoded_views(backbone, inputs, {"mix": mix, "one": mix[:1]})
        again = encoded_views(backbone, inputs, {"mix": [MixEntry(tuner, merged.tensors, 1.0)]})
    torch.testing.assert_close(states["mix"], again["mix"], rtol=1e-4, atol=1e-4)
    assert (states["mix"] - states["one"]).abs().max() > 1e-2
    name = "layers.0.mlp.experts.gate_up_proj"
    cut = tuner.at_rank(one, 2)
    assert cut[f"{name}.lora_A.weight"].shape == (4, 2, 24)
    assert cut[f"{name}.lora_B.weight"].shape == (4, 80, 2)
    model = with_peft("mixtral", tuner, merged.tensors, tmp_path / "adapter")
    real = inputs["attention_mask"] == 1
    with torch.no_grad():
        torch.testing.assert_close(
            backbone.lm_head(states["mix"])[real], model(**inputs).logits[real], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("family", "make", "words"),
    [
        ("mixtral", lambda: tuned("dora", sites=FIELDS), "tuner.sites: dora finds no linear layer"),
        ("mixtral", lambda: tuned("loha", sites="gate_up_proj"), "allowed: tuner=lora, which tunes"),
        ("mixtral", lambda: Delta(lora(FIELDS)), "tuner.sites: lora finds no linear layer"),
        ("mixtral", lambda: lora(FIELDS, dropout=0.1), "tuner.dropout: experts have none; allowed: tuner.dropout=0"),
        ("mixtral", lambda: lora(FIELDS, init="pissa"), "tuner.init: experts have none; allowed: tuner.init=uniform"),
        ("mixtral", lambda: TokenMixer(lora(FIELDS)), "a mixer weighs each token"),
        ("bamba", lambda: tuned("prefix"), "prefix"),
    ],
)
def test_what_experts_or_recurrent_mixers_have_not_is_refused(family, make, words):
    tuner = make()
    with pytest.raises(InputError) as refused:
        tuner.init(backbone_of(family), [], torch.Generator())
    assert words in str(refused.value)


def test_a_federation_over_experts(tmp_path, monkeypatch, silotune):
    """Of conversations: run, exported and counted."""
    language_model("qwen3_next").save_pretrained(tmp_path / "model")
    words = copy.deepcopy(tokenizer())
    words.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    words.save_pretrained(tmp_path / "model")
    for name in ("north", "south"):
        write_lines(tmp_path / f"{name}.jsonl", conversations(10))
    keys = {
        "method": "fedit",
        "backbone": "model",
        "tuner": {"name": "lora", "r": 2, "sites": FIELDS},
        "head": {"name": "lm", "max_new_tokens": 4, "train_on": "last"},
        "rounds": 1,
        "threads": 1,
        "precision": "fp32",
        "train": {"lr": 1e-2, "batch_size": 4, "steps": 1, "max_length": 160},
        "silos": [{"name": name, "path": f"{name}.jsonl"} for name in ("north", "south")],
    }
    (tmp_path / "chats.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    outcome = silotune("run", "chats.yaml", "method=feddpa-f", "--out", "out")
    assert outcome.code == 0, outcome.err
    exported = silotune("export", "out", "--silo", "north", "--part", "global", "--to", "lora")
    assert exported.code == 0, exported.err
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert "layers.1.mlp.experts.down_proj" in config["target_parameters"]
    refused = silotune("run", "chats.yaml", "method=flexlora", "--out", "other")
    assert "aggregation=flexlora: is defined for matrices" in refused.err
    listed = silotune(
        "parts", "fedit", "backbone=model", "tuner=lora", f"tuner.sites={FIELDS}", "head=linear", "head.pooling=last"
    ).out  # fmt: skip
    assert "tuned: 2 × layers.*.mlp.experts.down_proj" in listed
    assert "tuned: 1 × layers.*.self_attn.q_proj" in listed
