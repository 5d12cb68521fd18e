"""Where a shape may come from, and what is refused with one line."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from silotune.cost import estimate


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet"])
def test_a_folders_configuration_counts_what_its_weights_have(family, backbone_folder):
    folder = backbone_folder(family)
    with safe_open(folder / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    cost = estimate("fedavg-full", [f"backbone={folder}", "head=linear"], count_flops=False)
    assert cost.bare_parameters == sum(weights.values()) + 2 * 32 + 2
    assert cost.adapter_parameters == sum(size for name, size in weights.items() if not name.startswith("pooler"))


def test_the_folder_may_have_no_weights_at_all(config_file, silotune):
    path = config_file(model_type="gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=40)
    for source in (path, path.parent):
        outcome = silotune("cost", "fedavg", f"backbone={source}", "tuner=lora", "tokens=8", "--json")
        assert outcome.code == 0, outcome.err
        # the fused query, key and value layer is one site: A 8·32, B 96·8; in each of two blocks, for two adapters
        assert json.loads(outcome.out)["adapter_parameters"] == 2 * 2 * (8 * 32 + 96 * 8)


def test_the_table_for_reading_shows_what_leaves(config_file, silotune):
    path = config_file(
        model_type="bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    outcome = silotune("cost", "fedmcp", f"backbone={path}", "tuner.r=2", "tokens=8", "silos=4")
    assert outcome.code == 0
    sent = 2 * (2 * 32 * 2 + 2 + 32)
    assert f"{sent:,}" in outcome.out
    assert "4 silos" in outcome.out


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ((), "METHOD"),
        (("fedmpc",), "did you mean 'fedmcp'"),
        (("fedavg", "backbone=shape:bert-bas"), "did you mean 'shape:bert-base'"),
        (("fedavg", "backbone=nowhere/config.json"), "nowhere/config.json"),
        (("fedavg", "backbone=shape:bert-base", "silos=0"), "silos: must be a whole number of at least 1"),
        (("fedavg", "backbone=shape:bert-base", "tokens=many"), "tokens: must be"),
        (("fedavg", "backbone=shape:bert-base", "labels=1"), "labels: must be"),
        (("fedavg", "backbone=shape:bert-base", "tokens=513"), "tokens: 513 is more than the backbone reads; allowed"),
        (
            ("fedavg", "backbone=shape:bert-base", "tuner=prompt", "tokens=493"),
            "beside 20 virtual tokens (tuner.tokens); allowed: up to 492",
        ),
        (("fedavg", "backbone=shape:bert-base", "tuner=lore"), "did you mean 'lora'"),
        (("fedavg", "backbone=shape:llama-7b", "tuner=bitfit"), "bitfit"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(words, culprit, silotune):
    outcome = silotune("cost", *words)
    outcome.refusal(culprit)
    assert "Traceback" not in outcome.err


def test_words_that_a_prompt_begins_as_need_no_tokenizer():
    words = ["backbone=shape:bert-base", "tuner=prompt", "method.adapters=1"]
    begun = estimate("fedavg", [*words, "tuner.init=words", "tuner.words=it was great"], count_flops=False)
    assert begun == estimate("fedavg", words, count_flops=False)
    assert begun.adapter_parameters == 20 * 768


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "no-such-model"},
        {"model_type": "clip"},
        {"model_type": "llama", "hidden_size": 33, "num_attention_heads": 2},
        {"model_type": "bert", "hidden_size": "wide"},
    ],
)
def test_a_configuration_that_is_none_is_refused(fields, config_file, silotune):
    outcome = silotune("cost", "fedavg", f"backbone={config_file(**fields)}")
    outcome.refusal("backbone")
