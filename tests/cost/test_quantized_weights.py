"""`silotune cost` counts the bytes of quantized weights."""

from __future__ import annotations

import pytest

from silotune.cost import estimate

LINEAR = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
OUTPUTS = 32 * (4 * 4096 + 2 * 11008 + 4096)
EMBEDDINGS, NORMS = 32000 * 4096, 65 * 4096
LAYERS = {"none": 2 * LINEAR, "int8": LINEAR + 4 * OUTPUTS, "nf4": LINEAR // 2 + LINEAR // 16}


@pytest.mark.parametrize("quantization", LAYERS)
def test_llama_7b_in_bf16(quantization):
    words = ["tuner=lora", "backbone=shape:llama-7b", "precision=bf16", f"backbone.quantization={quantization}"]
    by_hand = LAYERS[quantization] + 2 * (EMBEDDINGS + NORMS)
    for head, more in {"mlp": 0, "lm": 2 * EMBEDDINGS}.items():  # its output embeddings are not tied
        cost = estimate("feddpa-t" if head == "lm" else "fedavg", [*words, f"head={head}"], count_flops=False)
        assert (cost.quantization, cost.backbone_mib * 2**20) == (quantization, by_hand + more)
