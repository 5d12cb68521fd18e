"""Families without an entry in `architectures.py`: a batch's answers are those of its prompts one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from silotune.models.backbone.loading import load_backbone
from silotune.models.forward.generation import GenerationOptions, generate_ids
from tests.support.decoder_families import tokenizer


@pytest.mark.parametrize("beams", [1, 2])
def test_learned_positions_do_not_count_padding(tmp_path: Path, beams: int) -> None:
    words = tokenizer()
    torch.manual_seed(1)
    model = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            num_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path), precision="fp32", device="cpu", model_class="AutoModelForCausalLM")
    assert backbone.known_architecture is None
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21]]
    options = GenerationOptions(beams, 6)
    assert generate_ids(backbone, prompts, [], options) == generate_ids(backbone, prompts, [], options, 1)
