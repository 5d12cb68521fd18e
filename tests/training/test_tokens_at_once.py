"""`train.tokens_at_once=auto`: a graph of that many tokens fits; the run folder keeps the number for a resume."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from silotune.config import TrainConfig, load_resolved
from silotune.errors import InputError
from silotune.methods import METHODS, Setting
from silotune.methods.parts import Scope
from silotune.models.backbone import device, loading
from silotune.models.backbone.block_devices import BlockDevices
from silotune.models.backbone.device import free_memory, total_memory
from silotune.models.backbone.loading import load_backbone
from silotune.models.forward.mixing import MixEntry, make_plan
from silotune.models.heads import HEADS
from silotune.models.tuners import TUNERS
from silotune.runs.run import run
from silotune.training import at_once
from silotune.training.at_once import kept_of_a_token, tokens_at_once

CPU = torch.device("cpu")
LORA = Setting(TUNERS["lora"](), HEADS["mlp"](), Scope.SHARED)
FEDAVG = METHODS["fedavg"](LORA)


def kept(backbone, rows, tokens):
    """Bytes that the graph of a forward under LoRA keeps, without weights and parts."""
    tuner = LORA.tuner
    part = tuner.init(backbone, [], torch.Generator().manual_seed(0))
    part = {name: tensor.requires_grad_() for name, tensor in part.items()}
    plan = make_plan(backbone, [MixEntry(tuner, part, 1.0)])
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
def test_what_is_counted_for_a_token_is_what_a_graph_keeps(model_folder, family):
    backbone = load_backbone(str(model_folder(family)), precision="fp32")
    found = kept(backbone, 8, 96) / (8 * 96)
    assert kept_of_a_token(TrainConfig(max_length=96), backbone, FEDAVG) == pytest.approx(found, rel=0.1)


def test_methods_with_two_adapters_and_dropout_keep_more(model_folder):
    backbone = load_backbone(str(model_folder("bert")), precision="fp32")
    train = TrainConfig(max_length=96)
    one, two = (kept_of_a_token(train, backbone, method) for method in (FEDAVG, METHODS["fedmcp"](LORA)))
    assert one < two < kept_of_a_token(train.model_copy(update={"dropout": 0.1}), backbone, METHODS["fedmcp"](LORA))


def test_auto_follows_the_memory_without_the_weights(model_folder, monkeypatch):
    folder = str(model_folder("llama"))
    backbone, saving = (load_backbone(folder, precision="fp32", checkpointing=each) for each in (False, True))
    weights = sum(tensor.numel() * 4 for tensor in backbone.model.parameters())
    train = TrainConfig(max_length=96, tokens_at_once="auto")
    one = kept_of_a_token(train, backbone, FEDAVG)
    for memory, expected in ((weights + int(1000 * one), 700), (weights, 1)):
        monkeypatch.setattr(at_once, "total_memory", lambda _, memory=memory: memory)
        assert tokens_at_once(train, backbone, FEDAVG) == pytest.approx(expected, abs=1)
    assert kept_of_a_token(train.model_copy(update={"gradient_checkpointing": True}), saving, FEDAVG) < one
    assert kept_of_a_token(train, saving, FEDAVG) == one
    assert tokens_at_once(TrainConfig(tokens_at_once=77), backbone, FEDAVG) == 77
    assert tokens_at_once(TrainConfig(), backbone, FEDAVG) is None
    backbone.block_devices = BlockDevices(CPU, {"layers.0": torch.device("cuda", 1)})
    monkeypatch.setattr(at_once, "total_memory", {CPU: 2**26, torch.device("cuda", 1): 2**24}.__getitem__)
    assert at_once.room_for_graphs(backbone) == 2 * 2**24 - weights


def test_a_resumed_run_keeps_what_the_first_start_chose(tiny_config, tmp_path, monkeypatch):
    config = tiny_config("fedavg", "rounds=1", "train.steps=1", "train.tokens_at_once=auto")
    digests = []
    for memory in (2**26, 2**40):
        monkeypatch.setattr(at_once, "total_memory", lambda _, memory=memory: memory)
        outcome = run(config, out=tmp_path / "run", resume=True)
        digests.append((load_resolved(tmp_path / "run" / "config.yaml").train.tokens_at_once, outcome.summary))
    (first, before), (second, after) = digests
    assert first == second
    assert 100 < first < 10**6
    assert before["state_sha256"] == after["state_sha256"]


def test_weights_larger_than_the_free_memory_are_refused_before_they_are_read(model_folder, monkeypatch):
    folder = str(model_folder("bert"))
    monkeypatch.setattr(loading, "free_memory", lambda _: 1000)
    monkeypatch.setattr(loading, "_read", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(InputError, match=r"take 0\.0 GiB, and cpu has 0\.0 GiB free; precision=bf16, "):
        load_backbone(folder, precision="fp32", device="cpu")


def test_the_machine_says_what_it_has():
    assert 2**20 < free_memory(CPU) <= total_memory(CPU) < 2**50


def test_a_containers_memory_is_its_share_of_the_machines(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(device, "_LIMIT", limit)
    machine = total_memory(CPU)
    for text, expected in (("1048576\n", 2**20), ("max\n", machine), (f"{2**60}\n", machine)):
        limit.write_text(text)
        assert total_memory(CPU) == expected
        assert free_memory(CPU) <= expected
