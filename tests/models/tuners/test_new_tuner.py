"""A tuner defined here exports and merges by its own methods alone; peft and folding refuse it."""

from __future__ import annotations

import importlib.util
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from silotune.errors import InputError
from silotune.interop.adapters import peft_layout
from silotune.interop.export import export
from silotune.models.tuners import TUNERS, register_tuner
from silotune.models.tuners.base import MergedAdapter, Tuner, weighted_sum
from silotune.models.tuners.target_modules import TargetModuleOptions, layer_widths
from tests.support.small_runs import PAIRS, close, encoded, own_states, rows_of
from tests.support.tuner_families import random_part, shared_backbone


class GainOptions(TargetModuleOptions):
    sites: tuple[str, ...] = ("value", "attention_output")


class Gain(Tuner):
    """`y·(1 + Σ weight·gain)`, with one tensor `<module>.gain` of shape (out,) per target module."""

    name = "gain"
    Options = GainOptions
    module_tensors = ("gain",)

    def init(self, backbone, tasks, generator):
        modules = self.options.modules(backbone, self.name)
        return {f"{module}.gain": torch.zeros(layer_widths(backbone.module(module))[1]) for module in modules}

    def act(self, backbone, mix, plan):
        for module in self.target_modules(mix[0].tensors):
            plan.outputs[module].append(partial(self._amplify, mix, f"{module}.gain"))

    def _amplify(self, mix, name, _, y):
        return y * (1 + sum(part.weight * part.tensors[name] for part in mix)).to(y.dtype)

    def merge(self, mix):
        return MergedAdapter(weighted_sum(mix), self.options.model_dump(mode="json"))

    def native_config(self, adapter):
        return {"computes": "y · (1 + gain), where y is the module's output", "numbers": 1}


class Unmergeable(Gain):
    """Lacks `merge`."""

    name = "unmergeable"
    merge = Tuner.merge


class Unexportable(Gain):
    """Lacks `native_config`."""

    name = "unexportable"
    native_config = Tuner.native_config


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The three tuners are registered during a test."""
    monkeypatch.setattr(TUNERS, "_registered", dict(TUNERS._registered))
    for tuner in (Gain, Unmergeable, Unexportable):
        register_tuner(tuner)


def standalone(folder):
    spec = importlib.util.spec_from_file_location("standalone_of_an_export", folder / "standalone.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("part", "mix"), [("global", {"global": 1}), ("mixed", {"global": 0.5, "private": 0.5})])
def test_it_is_exported_in_silotunes_layout(runs, part, mix, tmp_path):
    run = runs.run("bert", "gain", "method=fedmatch")
    folder = tmp_path / part
    assert export(run.model("beta"), part, folder)["layout"] == "silotune"
    config = json.loads((folder / "model.json").read_text())
    assert config["tuner"]["name"] == "gain"
    config = config["adapter"]
    assert config["numbers"] == 1
    assert config["computes"] == "y · (1 + gain), where y is the module's output"
    tensors = [name for name in load_file(folder / "model.safetensors") if name.startswith("adapter/")]
    assert set(tensors) == {f"adapter/{module}.gain" for module in config["modules"]}
    assert len(tensors) == 2 * 2, "two target modules in each of the tiny model's two blocks"

    loader, model = standalone(folder), AutoModel.from_pretrained(runs.model("bert")).eval()
    with pytest.raises(ValueError, match=r"no loader for kind 'gain' \(it computes y · \(1 \+ gain\)"):
        loader.attach(model, folder)
    loader.KINDS["gain"] = (("gain",), lambda gain: lambda module, inputs, y: y * (1 + gain))
    loader.attach(model, folder)
    inputs = encoded(folder, PAIRS)
    with torch.no_grad():
        states = rows_of(model(**inputs).last_hidden_state, inputs["attention_mask"])
    close(states, own_states(run, "beta", mix, PAIRS))
    plain = own_states(run, "beta", {}, PAIRS)
    assert max((one - other).abs().max() for one, other in zip(states, plain, strict=True)) > 0.01


def test_peft_has_no_such_tuner():
    backbone, tuner = shared_backbone("bert"), Gain()
    adapter = MergedAdapter(random_part(tuner, backbone), tuner.options.model_dump())
    assert peft_layout(backbone, tuner, adapter, "bert", "AutoModel") is None


def test_what_it_does_not_implement_is_refused(runs, tmp_path):
    gain = runs.run("bert", "gain", "method=fedmatch")
    with pytest.raises(
        InputError,
        match="with tuner gain has no such export",
    ):
        export(gain.model("beta"), "merged", tmp_path / "out")
    unmergeable = runs.run("bert", "unmergeable", "method=fedmatch")
    with pytest.raises(InputError, match="several adapters of tuner=unmergeable cannot be merged into one"):
        export(unmergeable.model("beta"), "mixed", tmp_path / "out")
    with pytest.raises(InputError, match="tuner=unexportable has no layout of adapters and cannot be folded"):
        export(runs.run("bert", "unexportable").model("beta"), "global", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_run_cannot_start_from_what_it_does_not_read(runs, tmp_path):
    with pytest.raises(InputError, match=r"is a LoRA, the run's tuner is gain; allowed: tuner=lora$"):
        runs.folder("bert", "gain", f"start={tmp_path}")
