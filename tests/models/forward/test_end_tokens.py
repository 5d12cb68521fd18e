"""Answers end at the tokenizer's end token, at those of `generation_config` and where the chat template ends a turn."""

from __future__ import annotations

import copy

import pytest
import torch

from silotune.models.forward.generation import GenerationOptions, end_tokens, generate_ids
from tests.support.language_models import backbone_of, byte_tokenizer, generated, made

CHATML = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{{ turn['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"


def backbone_with(template=None, listed=None):
    backbone = copy.copy(backbone_of("llama"))
    backbone.tokenizer = byte_tokenizer(begin=True)
    backbone.tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    backbone.tokenizer.chat_template = template
    backbone.model = copy.copy(backbone.model)
    backbone.model.generation_config = copy.deepcopy(backbone.model.generation_config)
    backbone.model.generation_config.eos_token_id = listed
    return backbone


@pytest.mark.parametrize("listed", [None, 7, [7, 9]])
@pytest.mark.parametrize("template", [None, CHATML, PLAIN])
def test_all_sources_count(template, listed):
    backbone = backbone_with(template, listed)
    turn_end = {backbone.tokenizer.convert_tokens_to_ids("<|im_end|>")} if template == CHATML else set()
    expected = {2} | turn_end | ({*listed} if isinstance(listed, list) else {listed} - {None})
    assert end_tokens(backbone) == expected


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_answers_end_at_each_of_a_list_as_generate_ends_them(beams):
    model, tokenizer = made("llama")
    prompts = [tokenizer(text)["input_ids"] for text in ("the garden was", "a", "perhaps the winter", "no song at")]
    length = 12

    def theirs(ids, ends):
        return generated(model, ids, length, beams, ends)

    free = [theirs(ids, [2]) for ids in prompts]
    ends = sorted({2, free[0][3], free[1][5], free[2][2]})
    backbone = copy.copy(backbone_of("llama"))
    backbone.model = copy.copy(model)
    backbone.model.generation_config = copy.deepcopy(model.generation_config)
    backbone.model.generation_config.eos_token_id = ends
    answers = generate_ids(backbone, prompts, [], GenerationOptions(beams, length))
    assert answers == [theirs(ids, ends) for ids in prompts]
    assert len({len(answer) for answer in answers}) > 1
    assert answers != free
