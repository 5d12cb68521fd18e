"""What peft saved beside a LoRA is as in the base model, or it is named and refused; nothing trained is lost."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

HARMLESS = {"ensure_weight_tying": True, "unsloth_fixed": True, "lora_dtype": "bf16", "corda_config": {"a": 1}}


def saved(base, folder, auto=AutoModelForCausalLM, larger=0, trained=True, keys={}, saving={}, **options):
    """A LoRA that peft saved with all that it saves beside it."""
    model = auto.from_pretrained(base)
    if larger:
        model.resize_token_embeddings(model.config.vocab_size + larger)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if trained and "modules_to_save" in name:
                parameter.add_(0.1)
    model.save_pretrained(folder, **saving)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


LLAMA = {"target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("names", "more"),
    [
        (["lm_head"], {"modules_to_save": ["lm_head"]}),
        (["embed_tokens"], {"modules_to_save": ["embed_tokens"]}),
        (["embed_tokens", "lm_head"], {"modules_to_save": ["embed_tokens", "lm_head"], "larger": 4, "trained": False}),
        (["norm"], {"modules_to_save": ["norm"]}),
        (["embed_tokens", "lm_head"], {"larger": 4, "saving": {"save_embedding_layers": True}}),
    ],
)
def test_what_was_trained_beside_the_lora_is_named_and_never_lost(silotune, runs, names, more, tmp_path):
    base = runs.model("llama", "causal")
    saved(base, tmp_path / "lora", **LLAMA, **more)
    outcome = silotune("import", tmp_path / "lora", "--backbone", base, "--to", tmp_path / "start")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert all(name in outcome.err for name in names)
    assert "merge_and_unload" in outcome.err
    assert not (tmp_path / "start").exists()


@pytest.mark.parametrize(
    ("family", "form", "more"),
    [
        ("llama", "causal", {**LLAMA, "keys": HARMLESS}),
        ("llama", "plain", {**LLAMA, "auto": AutoModel, "saving": {"save_embedding_layers": True}}),
        (
            "bert",
            "plain",
            {"auto": AutoModel, "target_modules": ["query"], "modules_to_save": ["key"], "trained": False},
        ),
    ],
)
def test_other_tools_keys_and_untrained_copies_are_taken(silotune, runs, family, form, more, tmp_path):
    base = runs.model(family, form)
    saved(base, tmp_path / "lora", **more)
    outcome = silotune("import", tmp_path / "lora", "--backbone", base, "--to", tmp_path / "start")
    assert (outcome.code, outcome.err) == (0, "")
