"""Forwards that know where rows are padded give the same bits as those that ask the masks."""

from __future__ import annotations

import pytest
import torch

from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.loading import load_backbone
from silotune.models.backbone.padding import Padding
from silotune.models.backbone.virtual_tokens import Prompt

LENGTHS = {"no padding": [7, 7, 7], "some": [7, 3, 5], "left": [-7, -3, -5]}


def inputs_of(lengths, decoder):
    mask = torch.tensor([[1] * n + [0] * (7 - n) if n > 0 else [0] * (7 + n) + [1] * -n for n in lengths])
    inputs = {"input_ids": torch.arange(21).reshape(3, 7) % 13 + 4, "attention_mask": mask}
    if decoder:
        own = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
        inputs |= {"decoder_input_ids": torch.full((3, 4), 5), "decoder_attention_mask": own}
    return inputs


@pytest.fixture(scope="module")
def loaded(model_folder):
    found = {}

    def load(family) -> Backbone:
        if family not in found:
            found[family] = load_backbone(str(model_folder(family)), precision="fp32")
        return found[family]

    return load


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5"])
def test_states_have_the_same_bits(loaded, family, attention, lengths, monkeypatch):
    backbone = loaded(family)
    for config in {id(m.config): m.config for m in backbone.base.modules() if hasattr(m, "config")}.values():
        config._attn_implementation = attention
    inputs = inputs_of(lengths, family == "t5")
    padding = Padding.of(inputs)
    prompt = Prompt(torch.ones(1, 2, backbone.hidden_size))
    for prompts in ([], [prompt]):
        expected = backbone.encode(inputs, ForwardPlan(prompts=prompts))
        found = backbone.encode(inputs, ForwardPlan(prompts=prompts), padding)
        assert torch.equal(found, expected)
    with monkeypatch.context() as patch:  # the knowledge is used: a wrong one changes states
        patch.setattr(Padding, "by_length", lambda self, text, decoder: dict.fromkeys(text, False))
        wrong = backbone.encode(inputs, ForwardPlan(), padding)
    assert torch.equal(wrong, backbone.encode(inputs, ForwardPlan())) is not padding.text or padding.left
