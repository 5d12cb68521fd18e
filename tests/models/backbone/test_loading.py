"""A backbone is loaded in the type that it computes in, with the options that the configuration names."""

from __future__ import annotations

import copy

import pytest
import torch

from silotune.config import BackboneConfig
from silotune.errors import InputError
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.loading import load_backbone
from tests.support.decoder_families import language_model, tokenizer
from tests.support.language_models import folder_of, made


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_all_weights_have_the_precisions_type_and_tables_of_angles_keep_theirs(family, model_folder):
    folder = str(model_folder(family))
    model_class = "AutoModelForCausalLM" if family == "llama" else "AutoModelForMaskedLM"
    backbone = load_backbone(folder, precision="bf16", model_class=model_class)
    assert {tensor.dtype for tensor in backbone.model.parameters()} == {torch.bfloat16}
    assert torch.bfloat16 not in {tensor.dtype for tensor in backbone.model.buffers()}
    assert backbone.lm_head is not None
    master = load_backbone(folder, precision="bf16", keep_master=True, model_class=model_class)
    assert {tensor.dtype for tensor in master.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_bf16_weights_compute_what_float32_weights_compute(family, model_folder):
    folder = str(model_folder(family))
    exact, rounded = (load_backbone(folder, precision=precision) for precision in ("fp32", "bf16"))
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 5, 7, 6]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected, found = (backbone.encode(dict(inputs), ForwardPlan()) for backbone in (exact, rounded))
    assert found.dtype is torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(found.float(), expected, dim=-1)
    assert cosine.min() > 0.99


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_is_the_one_that_was_asked_for(attention, backbone_folder):
    backbone = load_backbone(BackboneConfig(name=str(backbone_folder("bert")), attention=attention), precision="fp32")
    assert backbone.base.config._attn_implementation == attention


@pytest.mark.parametrize(
    ("family", "attention", "written"),
    [("llama", "auto", "sdpa"), ("llama", "eager", "eager"), ("gemma2", "auto", "eager")],  # Gemma 2 caps its scores
)
def test_a_cpu_writes_answers_with_fused_attention_and_trains_without(family, attention, written, tmp_path):
    language_model(family).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    settings = BackboneConfig(name=str(tmp_path), attention=attention)
    backbone = load_backbone(settings, device="cpu", model_class="AutoModelForCausalLM")
    config = backbone.base.config
    with backbone.writing():
        assert config._attn_implementation == written
    assert config._attn_implementation == "eager"


def test_flash_attention_without_a_gpu_is_refused(backbone_folder):
    settings = BackboneConfig(name=str(backbone_folder("bert")), attention="flash")
    with pytest.raises(InputError, match=r"backbone\.attention=flash: needs a GPU .* auto, eager, sdpa"):
        load_backbone(settings, device="cpu")


@pytest.mark.parametrize("name", ["default", "folder"])
def test_a_revision_belongs_to_an_id_of_the_hub(name, backbone_folder):
    settings = BackboneConfig(name=name if name == "default" else str(backbone_folder("bert")), revision="main")
    with pytest.raises(InputError, match=r"backbone\.revision: belongs to an id of the hub"):
        load_backbone(settings)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_files_that_hold_no_weights_are_refused(content, tmp_path):
    folder = folder_of("bert", tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"^backbone: .*model\.safetensors is no safetensors file, or not all of it"):
        load_backbone(str(folder))


def test_a_missing_shard_is_refused(model_folder, tmp_path):
    folder = model_folder("bert")
    load_backbone(str(folder)).model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "shards" / name).write_bytes((folder / name).read_bytes())
    first, *_ = sorted((tmp_path / "shards").glob("*.safetensors"))
    first.unlink()
    with pytest.raises(InputError, match=rf"^backbone: .*{first.name} is missing"):
        load_backbone(str(tmp_path / "shards"))


def test_a_tokenizer_with_tokens_that_have_no_embedding_is_refused(tmp_path):
    folder = str(folder_of("llama", tmp_path))
    tokenizer = made("llama")[1]
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"<new{number}>" for number in range(3)])
    larger.save_pretrained(folder)
    with pytest.raises(InputError, match=rf"has {len(tokenizer) + 3} tokens and its model {len(tokenizer)} word embed"):
        load_backbone(folder, precision="fp32")


def test_a_head_of_master_weights_is_cast_once_for_all_tokens(model_folder):
    """Autocast would cast the float32 head at every token."""
    folder = str(model_folder("llama"))
    options = {"precision": "bf16", "keep_master": True, "model_class": "AutoModelForCausalLM"}
    head = load_backbone(folder, **options).lm_head
    states = torch.randn(3, 32)

    def scores() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return head(states)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = head(states)  # with gradient, as in training
    assert expected.requires_grad is False
    first, cast = scores(), head._projection._cast
    assert torch.equal(first, expected)
    assert torch.equal(scores(), first)
    assert head._projection._cast is cast
    with torch.no_grad():
        head._projection.weight.zero_()
    assert not scores().any()


def test_without_the_hub_the_error_names_what_needs_none():
    with pytest.raises(InputError, match=r"^backbone: cannot load 'nobody/there' .*allowed: default, smollm2"):
        load_backbone("nobody/there", model_class="AutoModelForCausalLM")
