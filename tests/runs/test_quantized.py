"""Runs over a quantized backbone: resumed, opened, over workers and machines; what is refused in one line."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from safetensors.torch import load_file, save_file

import silotune as package
from silotune.models.backbone.loading import load_backbone
from silotune.runs.build.resolve import read_config
from tests.support.small_runs import SINGLE, save_model
from tests.support.tiny import TASKS, write_data

QUANTIZED = ("int8", "nf4", "int8-torchao")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return {kind: save_model("llama", kind, tmp_path_factory.mktemp(kind)) for kind in ("plain", "causal")}


@pytest.fixture(scope="module")
def words(llama, tmp_path_factory):
    """Words of FedMCP with LoRA over two tiny tasks."""
    data = write_data(tmp_path_factory.mktemp("data"), TASKS[:2], {"train": 12, "validation": 4, "test": 6})
    of_rows = [f"data.path={data}", f"data.tasks=[{','.join(TASKS[:2])}]", "data.merge=false", "rounds=2"]
    of_steps = ["train.steps=2", "train.lr=0.05", "train.max_length=32", "train.batch_size=4", "threads=1"]
    return ["demo", "method=fedmcp", "tuner=lora", f"backbone={llama['plain']}", "precision=fp32", *of_rows, *of_steps]


def states(run):
    return run.summary["state_sha256"]


def long(name):
    return pytest.param(name, marks=pytest.mark.long)


@pytest.mark.parametrize("quantization", ["nf4", long("int8"), long("int8-torchao")])
def test_interrupted_resumed_and_opened(words, quantization, tmp_path):
    own = [*words, f"backbone.quantization={quantization}"]
    whole = package.run(*own, out=tmp_path / "whole")
    assert yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["backbone"]["quantization"] == quantization
    assert whole.summary["quantization"] == quantization
    work = iter(range(5))

    def interrupt(*_: object) -> None:
        if next(work, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        package.run(*own, out=tmp_path / "run", progress=interrupt)
    again = package.run(*own, out=tmp_path / "run", resume=True)
    assert (states(again), again.silos) == (states(whole), whole.silos)
    model = package.load_model(tmp_path / "run", "alpha")
    assert model.predict(SINGLE) == whole.model("alpha").predict(SINGLE)
    plain = package.run(*words, out=tmp_path / "plain")
    assert states(plain) != states(whole)
    assert plain.summary["quantization"] == "none"


def test_the_fingerprint_has_the_stored_weights_and_the_quantization(llama, tmp_path):
    prints = {}
    for quantization in ("none", *QUANTIZED):
        section = read_config("demo", [f"backbone={llama['plain']}", f"backbone.quantization={quantization}"]).backbone
        for precision in ("fp32", "bf16"):
            loaded = load_backbone(section, precision=precision)
            prints.setdefault(quantization, set()).add(loaded.fingerprint)
    assert all(len(found) == 1 for found in prints.values())
    assert len(set.union(*prints.values())) == 4
    other = tmp_path / "other"
    other.mkdir()
    for file in llama["plain"].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    weights["norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    section = read_config("demo", [f"backbone={other}", "backbone.quantization=int8"]).backbone
    assert load_backbone(section, precision="fp32").fingerprint not in prints["int8"]


def test_a_tuner_of_the_weights_that_are_rounded_is_refused_in_one_line(words, silotune, tmp_path):
    more = ("tuner=full", "method=fedavg", "backbone.quantization=nf4")
    outcome = silotune("run", *words, *more, "--out", tmp_path / "run")
    assert (outcome.code, outcome.err.splitlines()[-1]) == (
        2,
        "silotune: tuner=full: trains the weights that backbone.quantization=nf4 rounds; allowed: "
        "backbone.quantization=none, or the tuners bottleneck, lora, dora, vera, loha, fed-sb, ravan, prefix, "
        "prompt, p-tuning, ia3, bitfit",
    )
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_missing_library_is_one_line(words, silotune, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    outcome = silotune("run", *words, "backbone.quantization=int8", "--out", tmp_path / "run")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == (
        "silotune: backbone.quantization=int8: needs bitsandbytes; pip install 'silotune[quantization]'"
    )


def test_a_checkpoint_stored_quantized_is_one_line(words, llama, silotune, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama["plain"] / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for quantization in ("none", "nf4"):
        more = [f"backbone={tmp_path}", f"backbone.quantization={quantization}"]
        outcome = silotune("run", *words, *more, "--out", tmp_path / "run")
        assert outcome.code == 2
        assert outcome.err.splitlines()[-1].startswith(f"silotune: backbone: '{tmp_path}' is stored quantized (bitsa")


@pytest.mark.long
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_workers_and_machines_end_in_the_same_state(words, silotune, quantization, tmp_path):
    own = [*words, f"backbone.quantization={quantization}"]
    whole = package.run(*own, out=tmp_path / "whole")
    assert states(package.run(*own, out=tmp_path / "workers", workers=2)) == states(whole)
    outcome = silotune("run", *own, "--engine", "flower-local", "--out", tmp_path / "flower")
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "flower" / "summary.json").read_text())["state_sha256"] == states(whole)
