"""A LoRA of peft to start from: a run begins as the model that peft computes; what does not fit is refused."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import silotune
from silotune.errors import InputError
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run_result import Run, load_run
from tests.support.command_line import Silotune
from tests.support.small_runs import PAIRS, SINGLE, close, own_states, states_of
from tests.support.tiny import save_backbone

SITES = ("query", "value")


def lora(base, folder, auto=AutoModel, **options):
    """A LoRA that peft made, moved away from where it starts, and saved by peft."""
    options = {"r": 3, "lora_alpha": 5, "target_modules": list(SITES)} | options
    model = peft.get_peft_model(auto.from_pretrained(base), peft.LoraConfig(**options))
    with torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """(folder, peft's model) of a plain LoRA on the tiny BERT. Read only."""
    folder = tmp_path_factory.mktemp("lora")
    return folder, lora(runs.model("bert"), folder)


def begun(words):
    """A run before its first round."""
    federation = build(read_config("demo", words))
    return Run(None, {}, federation)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_run_begins_as_pefts_model(silotune: Silotune, runs, made, form, tmp_path):
    folder, model = made
    start = folder
    if form == "file":
        start = tmp_path / "start.safetensors"
        outcome = silotune("import", folder, "--to", start)
        assert (outcome.code, outcome.err) == (0, "")
        words = "tuner=lora tuner.r=3 tuner.alpha=5 tuner.sites=query,value"
        assert f"backbone={runs.model('bert')} {words} start={start}" in outcome.out
    run = begun([*runs.words("bert", "lora"), f"start={start}"])
    close(own_states(run, "beta", {"global": 1}, PAIRS), states_of(model, runs.model("bert")))


def test_every_adapter_begins_so_and_so_does_their_mix(runs, made):
    folder, model = made
    words = [word for word in runs.words("bert", "lora") if word != "method.adapters=1"]
    run = begun([*words, "method=fedmatch", f"start={folder}"])
    expected = states_of(model, runs.model("bert"))
    for mix in ({"global": 1}, {"private": 1}, {"global": 0.5, "private": 0.5}):
        close(own_states(run, "alpha", mix, PAIRS), expected)


FIELDS = "query,key,value,attention_output,feedforward_input,feedforward_output"


@pytest.mark.parametrize(
    ("family", "auto", "options", "alpha", "sites"),
    [
        ("bert", AutoModelForSequenceClassification, {"task_type": "SEQ_CLS"}, "5", "query,value"),
        ("bert", AutoModel, {"use_rslora": True}, "8.660254038", "query,value"),
        ("bert", AutoModel, {"target_modules": "all-linear", "exclude_modules": ["pooler.dense"]}, "5", FIELDS),
        ("gpt2", AutoModelForCausalLM, {"target_modules": ["c_attn"], "fan_in_fan_out": True}, "5", "query"),
        ("t5", AutoModel, {"target_modules": ["q", "v"]}, "5", "query,value"),
    ],
)
def test_other_forms_of_loras(silotune: Silotune, runs, family, auto, options, alpha, sites, tmp_path):
    """A classifier's (its head is passed over), rank-stabilised scale, all layers, inside a language model, T5's."""
    base = runs.model(family, "causal" if family == "gpt2" else "plain")
    model = lora(base, tmp_path / "lora", auto, **options).get_base_model()
    start = tmp_path / "start"
    outcome = silotune("import", tmp_path / "lora", "--to", start, "--backbone", base)
    assert (outcome.code, outcome.err) == (0, "")
    told = outcome.out.split("silotune run … ")[1].split()
    tuner_words = ["tuner=lora", "tuner.r=3", f"tuner.alpha={alpha}", f"tuner.sites={sites}"]
    assert told == [f"backbone={base}", *tuner_words, f"start={start}"]
    run = begun([*runs.words(family, "lora", "causal" if family == "gpt2" else "plain"), *told])
    assert ("left out: classifier" in outcome.out) is ("task_type" in options)
    body = getattr(model, model.base_model_prefix, model)
    close(own_states(run, "beta", {"global": 1}, PAIRS), states_of(body, base))


def test_an_exported_adapter_comes_back_unchanged(silotune: Silotune, runs, tmp_path):
    run = runs.run("roberta", "lora")
    assert silotune("export", run.folder, "--silo", "beta", "--part", "global", "--to", tmp_path / "out").code == 0
    again = begun([*runs.words("roberta", "lora"), f"start={tmp_path / 'out'}"])
    kept = run.federation.coordinator.shared["global"]
    restored = again.federation.coordinator.shared["global"]
    assert list(restored) == list(again.federation.context.initial.start)
    assert restored.keys() == kept.keys()
    assert all(restored[name].equal(kept[name]) for name in kept)


def test_a_finished_run_needs_its_start_no_more(runs, made, tmp_path):
    """The run folder holds a copy; a silo that never trained begins from it."""
    shutil.copytree(made[0], tmp_path / "lora")
    run_folder = tmp_path / "run"
    words = [word for word in runs.words("bert", "lora") if word != "method.adapters=1"]
    words += ["method=fedmatch", "sampling.count=1", f"start={tmp_path / 'lora'}"]
    ran = silotune.run("demo", *words, out=run_folder)
    never = ({"alpha", "beta"} - {path.name for path in (run_folder / "checkpoints" / "silos").iterdir()}).pop()
    shutil.rmtree(tmp_path / "lora")
    again = load_run(run_folder)
    texts = PAIRS if never == "beta" else SINGLE
    assert again.model(never).predict(texts) == ran.model(never).predict(texts)
    kept = load_file(made[0] / "adapter_model.safetensors")
    adapter = again.federation.context.state_of(again.federation.silos[never]).private["private"]
    assert all(adapter[name.removeprefix("base_model.model.")].equal(tensor) for name, tensor in kept.items())


def test_a_run_is_not_resumed_from_another_start(runs, made, tmp_path):
    shutil.copytree(made[0], tmp_path / "lora")
    words = [*runs.words("bert", "lora"), f"start={tmp_path / 'lora'}"]
    silotune.run("demo", *words, out=tmp_path / "run")
    silotune.run("demo", *words, out=tmp_path / "run", resume=True)
    path = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(InputError, match="began from another LoRA"):
        silotune.run("demo", *words, out=tmp_path / "run", resume=True)


UNFIT = [
    (["tuner.r=4"], "has rank 3, tuner.r is 4; use tuner.r=3 tuner.alpha=5 tuner.sites=query,value"),
    (["tuner.alpha=6"], "has alpha 5, tuner.alpha is 6"),
    (["tuner.sites=query,key,value"], "has nothing at 'encoder.layer.0.attention.self.key', unlike tuner.sites"),
    (["tuner.sites=query"], "has a LoRA at 'encoder.layer.0.attention.self.value', unlike tuner.sites"),
    (["tuner=bottleneck"], "is a LoRA, the run's tuner is bottleneck; allowed: tuner=lora"),
    (["start=nowhere"], "nowhere cannot be read (No such file or directory); allowed: a folder in peft's layout"),
    (["tuner=bottleneck", "start=nowhere"], "nowhere cannot be read (No such file or directory); allowed: a folder"),
]


@pytest.mark.parametrize(
    ("words", "message", "form"), [*((*case, "folder") for case in UNFIT), *((*case, "file") for case in UNFIT[:5])]
)
def test_a_start_that_does_not_fit_the_run_is_refused(silotune: Silotune, runs, made, words, message, form, tmp_path):
    start = made[0]
    if form == "file":
        start = tmp_path / "start"
        assert silotune("import", made[0], "--to", start).code == 0
    run_words = [word for word in runs.words("bert", "lora") if "tuner=bottleneck" not in words or "tuner." not in word]
    outcome = silotune("run", "demo", *run_words, f"start={start}", *words, "--out", tmp_path / "out")
    outcome.refusal(message)
    assert not (tmp_path / "out").exists()


def change_config(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_tensor(function):
    def change(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        name = sorted(tensors)[0]
        save_file({key: function(tensor) if key == name else tensor for key, tensor in tensors.items()}, path)

    return change


def pickled(folder):
    (folder / "adapter_model.safetensors").unlink()
    torch.save({}, folder / "adapter_model.bin")


def renamed(folder):
    path = folder / "adapter_model.safetensors"
    save_file({name.replace("layer.0", "layer.7"): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_config(peft_type="IA3"), "peft_type is 'IA3'; allowed: LORA"),
        (change_config(r=4), "for r=4"),
        (change_config(r="3"), "r must be a positive whole number"),
        (change_config(lora_alpha=True), "lora_alpha must be a positive number"),
        (change_config(use_dora=True), "use_dora=True is more than a plain LoRA"),
        (change_config(rank_pattern={"query": 8}), "rank_pattern"),
        (change_config(bias="all"), "bias='all' trains bias terms too; allowed: none"),
        (change_config(init_lora_weights="pissa"), "init_lora_weights='pissa' changes the base model's weights"),
        (change_config(from_the_future=[1]), "from_the_future=[1] is more than a plain LoRA"),
        (change_config(base_model_name_or_path=None), "names no base model; give it with --backbone"),
        (change_tensor(lambda tensor: tensor.fill_(float("nan"))), "no finite numbers"),
        (change_tensor(lambda tensor: tensor[:, :5].contiguous()), "has shape (3, 5)"),
        (renamed, "tunes 'encoder.layer.7.attention.self.query', which is no linear layer"),
        (pickled, "a pickle, which is never opened"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "missing or damaged"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "no LoRA in peft's layout there"),
    ],
)
def test_a_lora_that_cannot_be_taken_is_refused(silotune: Silotune, made, change, message, tmp_path):
    shutil.copytree(made[0], tmp_path / "lora")
    change(tmp_path / "lora")
    silotune("import", tmp_path / "lora", "--to", tmp_path / "start").refusal(message)
    assert not (tmp_path / "start").exists()


def test_the_lora_of_another_model_is_refused(silotune: Silotune, runs, made, tmp_path):
    outcome = silotune("import", made[0], "--to", tmp_path / "start", "--backbone", runs.model("llama"))
    assert outcome.code == 2
    assert "is this the LoRA's base model?" in outcome.err
    wide = save_backbone("bert", tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text()) | {"hidden_size": 48}
    AutoModel.from_config(AutoModel.from_pretrained(wide).config.__class__(**config)).save_pretrained(wide)
    outcome = silotune("import", made[0], "--to", tmp_path / "start", "--backbone", wide)
    assert outcome.code == 2
    assert "it must be (3, 48)" in outcome.err
    (tmp_path / "start").write_text("mine")
    assert "already there" in silotune("import", made[0], "--to", tmp_path / "start").err
