"""`backbone.device_map`: which block goes where, and that a model loaded by a map computes what it computes without."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import infer_auto_device_map

from silotune.config import BackboneConfig
from silotune.errors import InputError
from silotune.models.backbone import block_devices as device_map
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.block_devices import BlockDevices, candidates, plan_blocks, release
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.lm_head import without_lm_head
from silotune.models.backbone.loading import load_backbone
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.engines.multi_process import MultiProcessEngine
from tests.support.language_models import made

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(free, …)`: this machine has GPUs with so many free bytes."""

    def have(*free: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(device_map, "free_memory", lambda device: free[device.index])
        monkeypatch.setattr(
            device_map, "available_devices", lambda: ["cpu", "cuda", *(f"cuda:{index}" for index in range(len(free)))]
        )

    return have


@pytest.fixture(scope="module")
def deep():
    """A Llama of eight blocks without data."""
    model = made("llama")[0]
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 8
    with torch.device("meta"):
        return type(model)(config)


def planned(setting, model, main=FIRST) -> list[torch.device]:
    devices = plan_blocks(setting, model, main, torch.float32)
    blocks = len(without_lm_head(model).layers)
    return [devices.of(f"layers.{index}.self_attn.q_proj.lora_A.weight") for index in range(blocks)]


def test_a_mapping_names_blocks_and_all_else_is_on_the_main_device(deep, gpus):
    gpus(2**40, 2**40)
    assert planned({"layers.3": "cuda:1"}, deep) == [FIRST] * 3 + [SECOND] + [FIRST] * 4
    assert planned({"layers": "cuda:1", "layers.7": "cuda:0"}, deep) == [SECOND] * 7 + [FIRST]
    devices = plan_blocks({"layers": "cuda:1"}, deep, FIRST, torch.float32)
    assert {devices.of(name) for name in ("embed_tokens", "norm", "prompt_embeddings", "layersx.1")} == {FIRST}
    assert devices.all == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"norm": "cuda:1"},
            r"'norm' is no block of this model; allowed: layers \(all its blocks\), layers.0 to layers.7",
        ),
        ({"layers.8": "cuda:1"}, "'layers.8' is no block"),
        (
            {"layers.1": "cuda:2"},
            "layers.1 cannot be on 'cuda:2'; allowed here, beside device=cuda: cuda, cuda:0, cuda:1",
        ),
        ({"layers.1": "cpu"}, "layers.1 cannot be on 'cpu'"),
    ],
)
def test_maps_that_name_what_there_is_not_are_refused(deep, gpus, setting, message):
    gpus(2**40, 2**40)
    with pytest.raises(InputError, match=rf"^backbone\.device_map: {message}"):
        planned(setting, deep)


def test_auto_spreads_blocks_about_evenly_over_all_gpus(deep, gpus):
    gpus(2**40, 2**40)
    assert candidates("auto", FIRST) == [FIRST, SECOND]
    assert planned("auto", deep) == [FIRST] * 4 + [SECOND] * 4
    assert planned("auto", deep, SECOND) == [SECOND] * 4 + [FIRST] * 4
    gpus(2**40)
    assert planned("auto", deep) == [FIRST] * 8
    assert candidates("auto", CPU) == [CPU]
    assert planned("auto", deep, CPU) == [CPU] * 8


def test_auto_takes_the_room_that_there_is(deep, gpus):
    block = sum(tensor.numel() * 4 for tensor in deep.model.layers[0].parameters())
    beside = sum(tensor.numel() * 4 for tensor in deep.parameters()) - 8 * block
    gpus(beside + 3 * block, 2**40)  # accelerate leaves room for one more block on the first
    assert planned("auto", deep) == [FIRST] * 2 + [SECOND] * 6
    gpus(beside + 3 * block, 5 * block)
    with pytest.raises(
        InputError, match=r"^backbone\.device_map=auto: 8 blocks of up to .* do not fit onto cuda:0, cuda:1"
    ):
        planned("auto", deep)


@pytest.mark.parametrize(
    ("family", "blocks"), [("llama", "layers"), ("t5", "decoder.block"), ("bert", "encoder.layer.1")]
)
@pytest.mark.parametrize("head", [True, False])
def test_a_model_loaded_by_a_map_has_the_same_bits(model_folder, family, blocks, head):
    folder = str(model_folder(family))
    kind = "AutoModel" if not head else "AutoModelForMaskedLM" if family == "bert" else "AutoModelForCausalLM"
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 5, 7]])
    found = []
    for mapping in (None, {blocks: "cpu"}, "auto"):
        settings = BackboneConfig(name=folder, device_map=mapping)
        backbone = load_backbone(settings, precision="fp32", device="cpu", model_class=kind)
        states = backbone.encode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ForwardPlan())
        scores = backbone.lm_head(states) if head else states
        found.append((backbone.fingerprint, states, scores))
        assert not any(hasattr(module, "_hf_hook") for module in backbone.model.modules())
    for fingerprint, states, scores in found[1:]:
        assert fingerprint == found[0][0]
        assert torch.equal(states, found[0][1])
        assert torch.equal(scores, found[0][2])


def test_what_accelerate_puts_on_a_model_is_removed():
    """Its hooks would stay in the copies of modules that the language-model head is made of."""
    model, tokenizer = made("llama")
    states = torch.randn(2, 3, 32)
    expected = Backbone(copy.deepcopy(model), tokenizer, device=CPU).lm_head(states)
    hooked = copy.deepcopy(model)
    dispatch_model(hooked, infer_auto_device_map(hooked, {"cpu": 2**40}), main_device="cpu", force_hooks=True)
    assert any(hasattr(module, "_hf_hook") for module in hooked.modules())
    release(hooked)
    assert not any(hasattr(module, "_hf_hook") or "forward" in vars(module) for module in hooked.modules())
    assert torch.equal(Backbone(hooked, tokenizer, device=CPU).lm_head(states), expected)


def test_what_it_cannot_do_is_refused_in_one_line(model_folder, monkeypatch):
    config = read_config("demo", ["method=fedavg", "tuner=full", "backbone.device_map=auto"])
    with pytest.raises(InputError, match=r"^tuner=full: trains the weights that backbone\.device_map spreads"):
        BackboneRequirements.of(config, make_method(config))
    spread = SimpleNamespace(backbone=SimpleNamespace(block_devices=BlockDevices(FIRST, {"layers.0": SECOND})))
    monkeypatch.setattr("silotune.runs.engines.in_process.InProcessEngine.__init__", lambda *_: None)
    with pytest.raises(InputError, match=r"^workers=2: backbone\.device_map takes all devices"):
        MultiProcessEngine(spread, None, workers=2)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        InputError, match=r"^backbone\.device_map: needs accelerate; pip install 'silotune\[quantization\]'"
    ):
        load_backbone(BackboneConfig(name=str(model_folder("bert")), device_map={"encoder.layer": "cpu"}), device="cpu")
