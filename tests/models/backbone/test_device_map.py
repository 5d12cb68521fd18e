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
from silotune.config.parse import load_resolved
from silotune.errors import InputError
from silotune.models.backbone import block_devices as device_map
from silotune.models.backbone import loading
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

    return have


@pytest.fixture(scope="module")
def deep():
    """A Llama of eight blocks without data."""
    model = made("llama")[0]
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 8
    with torch.device("meta"):
        return type(model)(config)


def planned(model, main=FIRST) -> list[torch.device]:
    devices = plan_blocks(model, candidates(main), torch.float32)
    assert {devices.of(name) for name in ("embed_tokens", "norm", "prompt_embeddings", "layersx.1")} == {main}
    blocks = len(without_lm_head(model).layers)
    return [devices.of(f"layers.{index}.self_attn.q_proj.lora_A.weight") for index in range(blocks)]


def test_auto_spreads_blocks_about_evenly_over_all_gpus(deep, gpus):
    gpus(2**40, 2**40)
    assert planned(deep) == [FIRST] * 4 + [SECOND] * 4
    assert planned(deep, SECOND) == [SECOND] * 4 + [FIRST] * 4
    assert candidates(CPU) == [CPU]


def test_auto_takes_the_room_that_there_is(deep, gpus):
    block = sum(tensor.numel() * 4 for tensor in deep.model.layers[0].parameters())
    beside = sum(tensor.numel() * 4 for tensor in deep.parameters()) - 8 * block
    gpus(beside + 3 * block, 2**40)  # accelerate leaves room for one more block on the first
    assert planned(deep) == [FIRST] * 2 + [SECOND] * 6
    gpus(beside + 3 * block, 5 * block)
    with pytest.raises(
        InputError, match=r"^backbone\.device_map=auto: 8 blocks of up to .* do not fit onto cuda:0, cuda:1"
    ):
        planned(deep)


@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
@pytest.mark.parametrize("head", [True, False])
def test_a_model_loaded_by_a_map_has_the_same_bits(model_folder, family, head, monkeypatch):
    """Blocks are on one device, as if there were two."""
    monkeypatch.setattr(loading, "candidates", lambda main: [main, main])
    monkeypatch.setattr(loading, "plan_blocks", lambda *_: BlockDevices(CPU))
    folder = str(model_folder(family))
    kind = "AutoModel" if not head else "AutoModelForMaskedLM" if family == "bert" else "AutoModelForCausalLM"
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 5, 7]])
    found = []
    for mapping in (None, "auto"):
        settings = BackboneConfig(name=folder, device_map=mapping)
        backbone = load_backbone(settings, precision="fp32", device="cpu", model_class=kind)
        states = backbone.encode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ForwardPlan())
        scores = backbone.lm_head(states) if head else states
        found.append((backbone.fingerprint, states, scores))
        assert not any(hasattr(module, "_hf_hook") for module in backbone.model.modules())
    (fingerprint, states, scores), (whole, *expected) = found
    assert fingerprint == whole
    assert torch.equal(states, expected[0])
    assert torch.equal(scores, expected[1])


def test_what_accelerate_puts_on_a_model_is_removed():
    """Its hooks would stay in the copies of modules that the language-model head is made of."""
    model, tokenizer = made("llama")
    states = torch.randn(2, 3, 32)
    expected = Backbone(copy.deepcopy(model), tokenizer, devices=BlockDevices(CPU)).lm_head(states)
    hooked = copy.deepcopy(model)
    dispatch_model(hooked, infer_auto_device_map(hooked, {"cpu": 2**40}), main_device="cpu", force_hooks=True)
    assert any(hasattr(module, "_hf_hook") for module in hooked.modules())
    release(hooked)
    assert not any(hasattr(module, "_hf_hook") or "forward" in vars(module) for module in hooked.modules())
    assert torch.equal(Backbone(hooked, tokenizer, devices=BlockDevices(CPU)).lm_head(states), expected)


def test_what_it_cannot_do_is_refused_in_one_line(model_folder, monkeypatch):
    config = read_config("demo", ["method=fedavg", "tuner=full", "backbone.device_map=auto"])
    with pytest.raises(InputError, match=r"^tuner=full: trains the weights that backbone\.device_map spreads"):
        BackboneRequirements.of(config, make_method(config))
    spread = SimpleNamespace(backbone=SimpleNamespace(block_devices=BlockDevices(FIRST, {"layers.0": SECOND})))
    monkeypatch.setattr("silotune.runs.engines.in_process.InProcessEngine.__init__", lambda *_: None)
    with pytest.raises(InputError, match=r"^workers=2: backbone\.device_map takes all devices"):
        MultiProcessEngine(spread, None, workers=2)
    monkeypatch.setattr(loading, "candidates", lambda main: [main, main])
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        InputError, match=r"^backbone\.device_map: needs accelerate; pip install 'silotune\[quantization\]'"
    ):
        load_backbone(BackboneConfig(name=str(model_folder("bert")), device_map="auto"), device="cpu")


def test_a_mapping_is_refused_and_one_of_an_older_run_is_auto(tmp_path):
    with pytest.raises(InputError, match=r"^backbone\.device_map: "):
        read_config("demo", ["backbone.device_map={layers: cuda:1}"])
    (tmp_path / "config.yaml").write_text("{data: {path: x}, backbone: {device_map: {layers: cuda:1}}}")
    assert load_resolved(tmp_path / "config.yaml").backbone.device_map == "auto"
