"""`train.tokens_at_once=auto`: the bytes that it counts on per token are enough, and its answer follows the memory."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from silotune.config import TrainConfig
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.loading import load_backbone
from silotune.models.forward.mixing import MixEntry, make_plan
from silotune.models.tuners import TUNERS
from silotune.training import token_memory
from silotune.training.at_once import tokens_at_once
from silotune.training.token_memory import most_kept
from tests.support.language_models import folder_of


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def kept(backbone, rows, tokens):
    """Bytes that the graph of a forward under LoRA keeps, without weights and parts."""
    tuner = TUNERS["lora"]()
    part = tuner.init(backbone, [], torch.Generator().manual_seed(0))
    part = {name: tensor.requires_grad_() for name, tensor in part.items()}
    plan: ForwardPlan = make_plan(backbone, [MixEntry(tuner, part, 1.0)])
    constant = {tensor.untyped_storage()._cdata for tensor in [*backbone.model.parameters(), *part.values()]}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in constant:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.full((rows, tokens), 5)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        states = backbone.encode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, plan)
    assert states.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5"])
def test_a_token_takes_no_more_than_counted_on(models, family):
    backbone = load_backbone(str(folder_of(family, models)), precision="fp32")
    train = TrainConfig(max_length=96)
    found = kept(backbone, 8, 96) / (8 * 96)
    assert found <= most_kept(backbone, train) <= 12 * found


def test_auto_follows_the_memory_without_the_weights(models, monkeypatch):
    backbone = load_backbone(str(folder_of("llama", models)), precision="fp32")
    weights = sum(tensor.numel() * 4 for tensor in backbone.model.parameters())
    train = TrainConfig(max_length=96, tokens_at_once="auto")
    one = most_kept(backbone, train)
    for memory, expected in ((weights + 1000 * one, 700), (weights, 1)):
        monkeypatch.setattr(token_memory, "total_memory", lambda _, memory=memory: memory)
        assert tokens_at_once(train, backbone) == pytest.approx(expected, abs=1)
    saving = train.model_copy(update={"gradient_checkpointing": True})
    assert most_kept(backbone, saving) < one
    assert tokens_at_once(TrainConfig(tokens_at_once=77), backbone) == 77
    assert tokens_at_once(TrainConfig(), backbone) is None
