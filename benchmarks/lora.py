"""Forward and backward through LoRA: ours against peft's on the same model, and a mix of two against one.

MiniLM, r = 8 on query and value, 16 rows of 64 tokens, float32, attention as plain matrix products in both. The three
alternate within one run; the ratios are medians over the rounds. Last key: ours / peft.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from silotune.core.randomness import generator
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import load_backbone
from silotune.models.forward.mixing import MixEntry, make_plan
from silotune.models.tuners.lora import LoRA, LoRAOptions

ROUNDS = 25
INNER = 3
SHAPE = (16, 64)


def measure() -> dict[str, Any]:
    """Median milliseconds of the three, and the two ratios."""
    torch.set_num_threads(1)
    inputs = {
        "input_ids": torch.randint(1000, 20000, SHAPE, generator=generator(1, "ids")),
        "attention_mask": torch.ones(SHAPE, dtype=torch.int64),
    }
    backbone = load_backbone("default", precision="fp32")
    steps = {"peft": _peft(inputs), "one": _ours(backbone, inputs, 1), "two": _ours(backbone, inputs, 2)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(INNER):
                step()
            if number >= 2:  # warm-up
                times[name].append((time.perf_counter() - started) / INNER)
    ratios = [two / one for one, two in zip(times["one"], times["two"], strict=True)]
    against_peft = [one / peft for one, peft in zip(times["one"], times["peft"], strict=True)]
    milliseconds = {f"{name}_ms": round(1000 * statistics.median(seconds), 2) for name, seconds in times.items()}
    return milliseconds | {
        "rounds": ROUNDS,
        "two_mixed_over_one": round(statistics.median(ratios), 3),
        "ratio": round(statistics.median(against_peft), 3),
    }


def _ours(backbone: Backbone, inputs: dict[str, torch.Tensor], parts: int) -> Callable[[], None]:
    tuner = LoRA(LoRAOptions())
    states = [
        {name: tensor.requires_grad_() for name, tensor in tuner.init(backbone, [], generator(1, "lora", part)).items()}
        for part in range(parts)
    ]
    mix = [MixEntry(tuner, state, 1 / parts) for state in states]

    def step() -> None:
        backbone.encode(inputs, make_plan(backbone, mix)).mean().backward()
        for state in states:
            for tensor in state.values():
                tensor.grad = None

    return step


def _peft(inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    from peft import LoraConfig, get_peft_model

    model = load_backbone("default", precision="fp32").base
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["query", "value"]))
    adapted.eval()

    def step() -> None:
        adapted(**inputs).last_hidden_state.mean().backward()
        adapted.zero_grad(set_to_none=True)

    return step
