"""Exports for servers: one plain LoRA whatever was trained, by their published rules; ONNX graphs of classifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from silotune.errors import InputError
from silotune.interop.export import export
from silotune.interop.onnx_model import onnx_logits
from silotune.interop.selection import select
from silotune.models.backbone.padding import known_masks
from tests.support.small_runs import PAIRS

SITES = "tuner.sites=query,key,value,attention_output,feedforward_input,feedforward_gate,feedforward_output"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def check_published_rules(folder: Path, program: str, rank: int) -> dict[str, torch.Tensor]:
    """Check what vLLM (`PEFTHelper`, `LoRAModel`) and SGLang (`LoRAConfig`, `LoRAManager`) check of an adapter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["bias"], config["modules_to_save"]) == ("LORA", "none", None)
    assert not config.get("use_dora")
    assert not config.get("rank_pattern")
    assert isinstance(config["target_modules"], list)
    assert config["r"] <= rank
    if program == "sglang":
        assert not config.get("use_rslora"), "SGLang scales by lora_alpha / r"
        assert not (folder / "added_tokens.json").exists()
    else:
        assert rank in VLLM_RANKS
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        module, matrix = name.removeprefix("base_model.model.").rsplit(".", 2)[0], name.rsplit(".", 2)[1]
        assert module.startswith("model.layers.")
        assert module.rpartition(".")[2] in {word.rpartition(".")[2] for word in config["target_modules"]}
        assert tensor.shape[0 if matrix == "lora_A" else 1] == config["r"]
    return tensors


@torch.no_grad()
def delta_of(folder: Path, base: Path) -> torch.Tensor:
    """Return the change of one layer's weights when peft has merged an export."""
    plain = AutoModelForCausalLM.from_pretrained(base).model.layers[1].self_attn.q_proj.weight.clone()
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).merge_and_unload()
    return model.model.layers[1].self_attn.q_proj.weight - plain


@pytest.mark.parametrize(
    ("program", "tuner", "words", "part", "rank", "exact"),
    [
        ("sglang", "lora", ("tuner.scaling=rslora",), "global", None, True),
        ("vllm", "lora", ("method={name: fedmcp}", SITES), "mixed", None, True),
        ("sglang", "lora", ("method={name: fedmcp}",), "mixed", 3, False),
        pytest.param("vllm", "dora", (), "global", 6, False, marks=pytest.mark.long),
        pytest.param("sglang", "vera", (), "global", None, True, marks=pytest.mark.long),
        ("vllm", "vera", (), "global", 2, False),
    ],
)
def test_servers_get_one_plain_lora(runs, tmp_path, program, tuner, words, part, rank, exact):
    model = runs.generation("llama", "causal", tuner, *words).model("east")
    about = export(model, part, tmp_path / "out", program=program, rank=rank)
    check_published_rules(tmp_path / "out", program, 8 if program == "vllm" else about["tuner"]["r"])
    if rank is not None:
        assert about["tuner"]["r"] == rank
    found = about["comparison"]
    assert (about["product_error"] == 0) is exact
    assert (found["largest_difference"] < 1e-5) is exact, found
    selection = select(model, part)
    layer = model.context.backbone.module("layers.1.self_attn.q_proj")
    wanted = selection.tuner.weight_delta(selection.adapter, "layers.1.self_attn.q_proj", layer)["weight"].float()
    lacking = delta_of(tmp_path / "out", runs.model("llama", "causal")) - wanted
    if exact:
        torch.testing.assert_close(lacking, torch.zeros_like(lacking), rtol=0, atol=1e-6)
    else:  # the best of this rank, and the error that was stated is of this size
        values = torch.linalg.svdvals(wanted)
        assert float(lacking.norm()) == pytest.approx(float(values[about["tuner"]["r"] :].norm()), rel=1e-3)
        assert 0 < about["product_error"] < 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--max-lora-rank" in card
    assert ("singular values" in card) is not exact


def test_one_weight_for_all_texts(runs, tmp_path):
    model = runs.run("bert", "lora", "method={name: feddpa-t}", "head=mlp").model("beta")
    about = export(model, "mixed", tmp_path / "out", alpha=0.4)
    assert about["mix"] == pytest.approx({"global": 0.6, "private": 0.4})
    assert about["comparison"]["largest_difference"] < 1e-5
    with pytest.raises(InputError, match="or one weight for all texts, --alpha NUMBER"):
        export(model, "mixed", tmp_path / "other")


@pytest.mark.parametrize(
    ("make", "part", "options", "words"),
    [
        (("generation", "llama", "causal", "ia3"), "global", {"program": "vllm"}, "not tuner=ia3"),
        (("generation", "llama", "causal", "lora"), "merged", {"program": "sglang"}, "not --part merged"),
        (("generation", "gpt2", "causal", "lora"), "global", {"program": "vllm"}, "loads no LoRA at c_attn"),
        (("run", "llama", "lora"), "global", {"program": "vllm"}, "head=mlp has none"),
        (("generation", "llama", "causal", "lora"), "global", {"program": "onnx"}, "not head=lm"),
        (("run", "bert", "lora"), "global", {"rank": 4}, "--rank: belongs to --for vllm"),
        (("run", "bert", "lora"), "mixed", {"alpha": 0.4}, "does not weigh texts"),
        (("run", "bert", "prompt"), "global", {"program": "onnx"}, "tuner=prompt cannot be"),
        (("generation", "llama", "causal", "ia3"), "global", {"program": "llama.cpp"}, "alone, not tuner=ia3"),
        (("generation", "llama", "causal", "lora"), "merged", {"program": "ollama"}, "not --part merged"),
        (("generation", "llama", "causal", "lora"), "global", {"program": "tgi"}, "--for 'tgi'"),
        (("generation", "gpt2", "causal", "lora"), "global", {"program": "llama.cpp"}, "not of gpt2"),
        (("generation", "t5", "seq2seq", "lora"), "global", {"program": "llama.cpp"}, "head=lm has none"),
        (("run", "llama", "lora"), "global", {"program": "llama.cpp"}, "head=mlp has none"),
    ],
)
def test_what_no_program_reads_is_refused(runs, tmp_path, make: Any, part, options, words):
    kind, *names = make
    run = getattr(runs, kind)(*names)
    with pytest.raises(InputError) as refused:
        export(run.model("east" if kind == "generation" else "alpha"), part, tmp_path / "out", **options)
    assert words in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "tuner", "words"),
    [
        ("bert", "lora", ("method={name: fedmcp}",)),
        pytest.param("roberta", "dora", ("head=linear", "head.pooling=mean"), marks=pytest.mark.long),
        pytest.param("llama", "lora", (), marks=pytest.mark.long),
    ],
)
def test_an_onnx_graph_has_the_runs_scores(runs, tmp_path, family, tuner, words):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    model = runs.run(family, tuner, *words).model("beta")
    for attention in ("eager", "sdpa"):  # as after forwards of other families in this process
        with known_masks({7: True}, attention):
            pass
    about = export(model, "merged", tmp_path / "out", program="onnx")
    assert about["comparison"]["largest_difference"] < 1e-5
    assert about["comparison"]["same_answers"] == 4
    expected = [list(one.probabilities.values()) for one in model.predict(PAIRS)]
    torch.testing.assert_close(
        onnx_logits(tmp_path / "out", PAIRS).softmax(-1), torch.tensor(expected), rtol=0, atol=1e-5
    )
    names: dict[str, Any] = {}
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace("FOLDER", str(tmp_path / "out")), names)
    assert names["logits"].shape == (1, len(model.task.labels))


def test_push_uploads_what_export_wrote(silotune, runs, tmp_path, monkeypatch):
    """Without the hub: what is asked of its client, and nothing with `--dry-run`."""
    calls: list[tuple[str, Any, Any]] = []
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(
            huggingface_hub.HfApi, name, lambda self, *words, name=name, **more: calls.append((name, words, more))
        )
    export(runs.run("bert", "lora", "method={name: fedmcp}").model("beta"), "mixed", tmp_path / "mixed")
    export(runs.generation("llama", "causal", "lora").model("east"), "global", tmp_path / "global")  # no head's tensors
    dry = silotune("push", tmp_path / "mixed", "me/adapter", "--dry-run")
    assert (dry.code, calls) == (0, [])
    assert "adapter_model.safetensors" in dry.out
    assert "private repository me/adapter" in dry.out
    assert silotune("push", tmp_path / "mixed", "me/adapter").code == 0
    (_, _, made), (_, _, sent) = calls
    assert made == {"private": True, "exist_ok": True}
    assert (sent["repo_id"], sent["folder_path"]) == ("me/adapter", tmp_path / "mixed")
    assert "never left the silo" in silotune("push", tmp_path / "mixed", "me/adapter", "--public").err
    assert silotune("push", tmp_path / "global", "me/adapter", "--public").code == 0
    assert not calls[-2][2]["private"]
    assert "no folder that `silotune export` wrote" in silotune("push", tmp_path, "me/adapter").err
    assert "was not written" in silotune("push", tmp_path / "global", "me/ada pter").err
    data = huggingface_hub.ModelCard.load(tmp_path / "mixed" / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-classification")
