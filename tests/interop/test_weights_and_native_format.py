"""Adapters folded into the weights, silotune's native layout, and the loader that an export carries along."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from silotune.config import BackboneConfig
from silotune.errors import InputError
from silotune.interop.adapters import load_plain
from silotune.interop.export import export
from silotune.runs.personal_model import PersonalModel
from tests.support.small_runs import (
    PAIRS,
    SINGLE,
    carried_along,
    close,
    head_logits,
    own_logits,
    own_states,
    same_probabilities,
    states_of,
    tokenised,
)

MIX = {"global": 0.5, "private": 0.5}


@pytest.mark.parametrize(
    ("family", "tuner"),
    [
        *((family, "lora") for family in ("bert", "gpt2", "llama", "t5")),
        *(("bert", tuner) for tuner in ("dora", "vera", "ia3", "bitfit", "full")),
        *(("gpt2", "dora"), ("t5", "ia3"), ("t5", "full")),
        *(pytest.param("gpt2", tuner, marks=pytest.mark.long) for tuner in ("vera", "ia3", "bitfit")),
        pytest.param("roberta", "lora", marks=pytest.mark.long),
    ],
)
def test_transformers_alone_loads_the_silos_model(runs, family, tuner, tmp_path):
    """The weighted sum of two adapters is in the weights, the head beside them."""
    run = runs.run(family, tuner, "method=fedmatch")
    export(run.model("beta"), "merged", tmp_path / "out")
    model, report = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    actual = states_of(model.eval(), tmp_path / "out")
    close(actual, own_states(run, "beta", MIX, PAIRS))
    close([head_logits(tmp_path / "out", actual)], [own_logits(run, "beta", PAIRS)])
    plain = states_of(AutoModel.from_pretrained(runs.model(family)).eval(), tmp_path / "out")
    assert max((one - other).abs().max() for one, other in zip(actual, plain, strict=True)) > 0.01
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize(("family", "method"), [("bert", "fedex-lora"), ("gpt2", "flora")])
def test_a_delta_is_in_the_weights(runs, family, method, tmp_path):
    run = runs.run(family, "lora", f"method={method}", f"aggregation={method}")
    about = export(run.model("beta"), "merged", tmp_path / "out")
    assert (about["layout"], about["whole"]) == ("weights", True)
    actual = states_of(AutoModel.from_pretrained(tmp_path / "out").eval(), tmp_path / "out")
    close(actual, own_states(run, "beta", {"global": 1, "delta": 1}, PAIRS))
    without = own_states(run, "beta", {"global": 1}, PAIRS)
    assert max((one - other).abs().max() for one, other in zip(actual, without, strict=True)) > 1e-4


def test_a_merged_language_model_keeps_its_head(runs, tmp_path):
    run = runs.generation("gpt2", "causal", "lora")
    export(run.model("east"), "merged", tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    rows = tokenised(run, "east", SINGLE)
    for ids, states in zip(rows.ids, own_states(run, "east", {"global": 1}, SINGLE), strict=True):
        with torch.no_grad():
            close([model.eval()(torch.tensor([ids])).logits[0]], [run.federation.backbone.lm_head(states)])


def test_a_merged_model_has_the_type_of_its_base(runs, tmp_path):
    folder = shutil.copytree(runs.model("bert"), tmp_path / "bf16")
    save_file(
        {k: v.bfloat16() for k, v in load_file(folder / "model.safetensors").items()}, folder / "model.safetensors"
    )
    run = runs.run("bert", "lora", f"backbone={folder}")
    export(run.model("beta"), "merged", tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_backbone_is_not_unpickled(runs, tmp_path):
    """Safetensors files alone are read, also where there are none."""
    folder = shutil.copytree(runs.model("bert"), tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert AutoModel.from_pretrained(folder), "transformers would take it"
    with pytest.raises(InputError, match=r"backbone: cannot load .*pickled.*safetensors") as refused:
        load_plain(BackboneConfig(name=str(folder)), "AutoModel")
    assert "\n" not in str(refused.value)


def test_one_part_of_full_fine_tuning_is_a_plain_model(runs, tmp_path):
    run = runs.run("bert", "full", "method=fedmatch")
    for part in ("global", "private"):
        about = export(run.model("beta"), part, tmp_path / part)
        assert about["layout"] == "weights"
        actual = states_of(AutoModel.from_pretrained(tmp_path / part).eval(), tmp_path / part)
        close(actual, own_states(run, "beta", {part: 1}, PAIRS))


def test_a_pooler_stays_as_it_was(runs, tmp_path):
    """Nothing here reads it, but a model loaded by transformers alone has it."""
    export(runs.run("bert", "lora").model("beta"), "merged", tmp_path / "out")
    before, after = (AutoModel.from_pretrained(folder) for folder in (runs.model("bert"), tmp_path / "out"))
    assert torch.equal(before.pooler.dense.weight, after.pooler.dense.weight)


@pytest.mark.parametrize(
    ("family", "tuner"),
    [*((family, "bottleneck") for family in ("bert", "gpt2", "llama", "t5")), ("bert", "bitfit"), ("gpt2", "bitfit")],
)
def test_native_layout(runs, family, tuner, tmp_path):
    run = runs.run(family, tuner, "method=fedmatch")
    alone = {"global": {"global": 1}, "private": {"private": 1}} if family == "bert" else {}
    for part, mix in {**alone, "mixed": MIX}.items():
        export(run.model("beta"), part, tmp_path / part)
        model = AutoModel.from_pretrained(runs.model(family)).eval()
        plain = states_of(model, tmp_path / part)
        handles = carried_along(tmp_path / part).attach(model, tmp_path / part)
        close(states_of(model, tmp_path / part), own_states(run, "beta", mix, PAIRS))
        for handle in handles:
            handle.remove()
        close(states_of(model, tmp_path / part), plain)


def test_native_layout_is_what_its_description_says(runs, tmp_path):
    """The bottleneck of the last block, recomputed from the files alone."""
    run = runs.run("bert", "bottleneck")
    export(run.model("beta"), "global", tmp_path)
    about = json.loads((tmp_path / "model.json").read_text())
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("adapter/"): stored[name] for name in stored if name.startswith("adapter/")}
    config = about["adapter"]
    assert (about["format"], about["version"], about["tuner"]["name"], config["r"]) == (
        "silotune-model",
        1,
        "bottleneck",
        3,
    )
    assert about["backbone_sha256"] == run.federation.backbone.fingerprint
    names = ("down.weight", "down.bias", "up.weight", "up.bias")
    assert set(tensors) == {f"{module}.{name}" for module in config["modules"] for name in names}
    site = config["modules"][-1]
    down, down_bias, up, up_bias = (tensors[f"{site}.{name}"] for name in names)
    model = AutoModel.from_pretrained(runs.model("bert"))
    module = model.get_submodule(site)
    x = torch.randn(2, 5, module.in_features)
    with torch.no_grad():
        plain = module(x)
        carried_along(tmp_path).attach(model, tmp_path)
        moved = module(x)
        low = plain @ down.T + down_bias
        expected = plain + (0.5 * low * (1 + torch.erf(low / 2**0.5))) @ up.T + up_bias
    close([moved], [expected])


def test_silotune_opens_the_native_layout_too(runs, tmp_path):
    run = runs.run("bert", "bottleneck", "method=fedmatch")
    export(run.model("beta"), "mixed", tmp_path / "out")
    opened = PersonalModel.open(tmp_path / "out", run.federation.backbone)
    for one, other in zip(opened.predict(PAIRS), run.model("beta").predict(PAIRS), strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_native_layout_refuses_what_does_not_belong_together(runs, tmp_path):
    export(runs.run("bert", "bottleneck").model("beta"), "global", tmp_path)
    module, model = carried_along(tmp_path), AutoModel.from_pretrained(runs.model("bert"))
    path = tmp_path / "model.safetensors"
    for recorded in (tmp_path / name for name in ("model.json", "export.json")):
        if recorded.exists():  # files are compared with their sha256 before anything else
            content = json.loads(recorded.read_text(encoding="utf-8"))
            recorded.write_text(json.dumps(content | {"files": {}}), encoding="utf-8")
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".up.bias"))
    save_file(tensors | {name: torch.zeros(7)}, path)
    with pytest.raises(ValueError, match="not the 32 of this model"):
        module.attach(model, tmp_path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(ValueError, match="differ"):
        module.attach(model, tmp_path)


@pytest.mark.parametrize(
    "tuner", ["lora", "dora", "vera", "ia3", "prompt", "p-tuning", "prefix", "bottleneck", "bitfit"]
)
def test_the_loader_predicts_as_the_silo_does(runs, tuner, tmp_path):
    """Pairs on BERT: segments are kept under virtual tokens too, which peft's own forward drops."""
    words = ("method=fedmcp", "head.pooling=first") if tuner == "lora" else ("method=fedmatch",)
    run = runs.run("bert", tuner, *words)
    export(run.model("beta"), "mixed", tmp_path / "out")
    actual = carried_along(tmp_path / "out").load(tmp_path / "out").predict(PAIRS)
    expected = run.model("beta").predict(PAIRS)
    assert [one["label"] for one in actual] == [one.label for one in expected]
    same_probabilities(actual, expected)


@pytest.mark.parametrize(
    ("family", "part", "pooling"), [("llama", "mixed", "last"), ("t5", "mixed", "mean"), ("t5", "merged", "mean")]
)
def test_the_loader_of_a_causal_classifier_and_of_an_encoder_decoder(runs, family, part, pooling, tmp_path):
    """A causal one reads the last token."""
    words = ["head.pooling=auto"] if family == "llama" else ["method=fedmatch"]
    run = runs.run(family, "lora", *words)
    assert run.federation.config.head.pooling == pooling
    export(run.model("beta"), part, tmp_path / "out")
    actual = carried_along(tmp_path / "out").load(tmp_path / "out").predict(PAIRS)
    same_probabilities(actual, run.model("beta").predict(PAIRS))


@pytest.mark.long
def test_the_loader_needs_nothing_of_silotune(runs, tmp_path):
    run = runs.run("bert", "bottleneck")
    export(run.model("alpha"), "global", tmp_path / "out")
    code = "import sys; sys.modules['silotune'] = None; sys.modules['peft'] = None; sys.argv[0] = 'x'; import runpy; "
    code += "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    words = [sys.executable, "-W", "ignore", "-c", code, tmp_path / "out" / "standalone.py", *SINGLE]
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["text"] for line in lines] == SINGLE
    same_probabilities(lines, run.model("alpha").predict(SINGLE))


def test_the_loader_reads_long_lists_in_pieces_and_names_a_missing_base(runs, tmp_path, monkeypatch):
    export(runs.run("bert", "bottleneck", "method=fedmatch").model("beta"), "global", tmp_path / "out")
    loader = carried_along(tmp_path / "out")
    model, texts = loader.load(tmp_path / "out"), [PAIRS[n % len(PAIRS)] for n in range(7)]
    whole = model.logits(texts)
    calls: list[int] = []
    monkeypatch.setattr(loader, "_ROWS", 3)
    model.model.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(model.logits(texts), whole, rtol=1e-4, atol=1e-5)
    assert len(calls) == 3
    with pytest.raises(OSError, match=r"^base model '.*nowhere': .*load\(folder, base=FOLDER\)$"):
        loader.load(tmp_path / "out", base=str(tmp_path / "nowhere"))


def test_the_loader_takes_a_base_on_the_command_line(runs, tmp_path, monkeypatch, capsys):
    run = runs.run("bert", "bottleneck")
    export(run.model("alpha"), "global", tmp_path / "out", base=str(tmp_path / "nowhere"))
    loader = carried_along(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["standalone.py", SINGLE[0]])
    with pytest.raises(SystemExit, match=r"^base model '.*nowhere': .* Give its folder: --base FOLDER$"):
        loader._main()
    monkeypatch.setattr(sys, "argv", ["standalone.py", "--base", str(runs.model("bert")), SINGLE[0]])
    loader._main()
    same_probabilities([json.loads(capsys.readouterr().out)], run.model("alpha").predict(SINGLE[:1]))
