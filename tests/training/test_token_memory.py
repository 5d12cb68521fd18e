"""What `auto` counts on per token is enough for every family, also on a CUDA device, and for each device of a map."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, GPT2Config

from silotune.config import TrainConfig
from silotune.core.randomness import Stream
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.block_devices import BlockDevices
from silotune.models.forward.mixing import MixEntry, make_plan
from silotune.models.tuners.lora import LoRA, LoRAOptions
from silotune.training import token_memory
from silotune.training.at_once import tokens_at_once
from silotune.training.token_memory import device_rooms, most_kept
from tests.support.decoder_families import CONFIGS, EXPERTS, tokenizer
from tests.support.device_rig import device
from tests.support.fake_cuda import REAL, OnDevice, fake_cuda, to_fake_cuda
from tests.support.language_models import backbone_of

__all__ = ["device"]  # a fixture

SITES = (
    *("query", "key", "value", "attention_output"),
    *("feedforward_input", "feedforward_gate", "feedforward_output"),
)
SHAPE = {"vocab_size": 64, "pad_token_id": 0}
MORE = {
    "bert": lambda: BertConfig(
        hidden_size=24, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, **SHAPE
    ),
    "gpt2": lambda: GPT2Config(n_embd=24, n_layer=2, n_head=4, **SHAPE),
}
FAMILIES = [*CONFIGS, *MORE]


def backbone(family: str, attention: str, precision: str) -> Backbone:
    """A tiny model; the feed-forward of Gemma is wide, as it is in large ones."""
    config = MORE[family]() if family in MORE else CONFIGS[family](**SHAPE, bos_token_id=1, eos_token_id=2)
    if family.startswith("gemma"):
        config.intermediate_size = 8 * config.hidden_size
    config = copy.deepcopy(config)
    kind = AutoModel if family == "bert" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = kind.from_config(config, attn_implementation=attention)
    model = model.to(torch.bfloat16) if precision == "bf16" else model
    return Backbone(model, tokenizer(), name=family, precision=precision)


def inside(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.inner if isinstance(tensor, OnDevice) else tensor).untyped_storage()


def kept(model: Backbone, train: TrainConfig, on_device: bool, tuner_dropout: float = 0.1) -> float:
    """Bytes that the graph of a forward keeps per token, with LoRA and dropout at every linear layer that it finds."""
    found = [site for site in SITES if any(stack.modules(site, 0) for stack in model.architecture.stacks)]
    tuner = LoRA(LoRAOptions(sites=tuple(found), r=2, dropout=tuner_dropout))
    part = tuner.init(model, [], torch.Generator().manual_seed(0))
    storages: dict[int, int] = {}
    with fake_cuda() if on_device else nullcontext():
        if on_device:
            to_fake_cuda(model)
        part = {name: tensor.requires_grad_() for name, tensor in model.place(part).items()}
        constant = [*model.model.parameters(), *model.model.buffers(), *part.values()]
        known = {inside(tensor)._cdata for tensor in constant}
        held = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = inside(tensor)
            if storage._cdata not in known:
                storages[storage._cdata] = storage.nbytes()
                held.append(storage)  # so that its address stays its own
            return tensor

        ids = torch.randint(3, 60, (3, train.max_length))
        mask = torch.ones_like(ids)
        mask[1, train.max_length // 2 :] = 0
        plan = make_plan(model, [MixEntry(tuner, part, 1.0)]).with_dropout(train.dropout)
        with Stream(0, "dropout"), saved_tensors_hooks(pack, lambda tensor: tensor):
            states = model.encode(model.place({"input_ids": ids, "attention_mask": mask}), plan)
        assert states.requires_grad
    return sum(storages.values()) / ids.numel()


def check(family: str, attention: str, precision: str, on_device: bool, dropout: str | None) -> None:
    train = TrainConfig(max_length=64, dropout=dropout)
    model = backbone(family, attention, precision)
    measured = kept(model, train, on_device)
    assert measured <= most_kept(model, train) <= 6 * measured


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_token_of_gemma_takes_no_more_than_counted_on(precision):
    """Soft caps, norms in float32, four of them a block, and a wide feed-forward with a gate."""
    check("gemma2", "eager", precision, False, None)


@pytest.mark.long
@pytest.mark.parametrize("dropout", [None, "own"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_no_more_than_counted_on(family, precision, dropout):
    for attention in ("eager", "sdpa") if family != "gemma2" else ("eager",):
        check(family, attention, precision, False, dropout)


@pytest.mark.long
@pytest.mark.skipif(bool(REAL), reason="bytes are counted inside the fake device's tensors")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERTS])
def test_so_it_is_on_a_cuda_device(device, family):
    for dropout in (None, "own"):
        check(family, "eager", "bf16", True, dropout)


# -- several devices ---------------------------------------------------------------------------------------------------


def test_each_device_of_a_map_has_room_for_its_own_blocks(monkeypatch):
    model = copy.copy(backbone_of("llama"))
    train = TrainConfig(max_length=96, tokens_at_once="auto")
    main, other = torch.device("cpu"), torch.device("cuda", 1)
    names = [f"layers.{number}" for number in range(len(model.base.layers))]
    memory = {main: 2**26, other: 2**24}
    monkeypatch.setattr(token_memory, "total_memory", memory.__getitem__)

    def spread(blocks):
        model.block_devices = BlockDevices(main, dict.fromkeys(blocks, other))
        return tokens_at_once(train, model), device_rooms(model, train)

    alone, (room,) = spread([])
    assert room.beside_weights == 2**26 - sum(tensor.nbytes for tensor in model.model.parameters())
    half, rooms = spread(names[1:])
    assert [each.total for each in rooms] == [2**26, 2**24]
    assert sum(each.kept for each in rooms) == room.kept
    assert sum(each.total - each.beside_weights for each in rooms) == 2**26 - room.beside_weights
    assert half == int(0.7 * rooms[1].beside_weights) // rooms[1].kept < alone
    whole, (elsewhere,) = spread(names)  # nothing but embeddings and head is on the main device
    assert elsewhere.kept == room.kept
    assert whole == int(0.7 * elsewhere.beside_weights) // room.kept < half
