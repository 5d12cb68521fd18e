"""The cache of a generation keeps keys and values in the type that products are computed in."""

from __future__ import annotations

import torch

from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.decoding import start_decoding
from tests.support.language_models import made


def test_keys_and_values_have_the_backbones_type():
    model, tokenizer = made("llama")
    backbone = Backbone(model, tokenizer, precision="bf16")  # float32 weights: keys come in float32
    prompts = [tokenizer(text)["input_ids"] for text in ("the garden was", "a")]
    with torch.no_grad():
        decoding = start_decoding(backbone, prompts, [])
        decoding.first()
        decoding.next(torch.tensor([5, 6]))
    assert {tensor.dtype for layer in decoding._cache.layers for tensor in (layer.keys, layer.values)} == {
        torch.bfloat16
    }
