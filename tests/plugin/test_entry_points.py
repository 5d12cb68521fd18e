"""What an installed package adds works in every process of a run, with its defaults and options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import silotune
from silotune.communication.uplink import BUILT_IN_CODECS
from silotune.config import dump, registries
from silotune.errors import InputError
from tests.plugin.conftest import install
from tests.support.processes import SAME, assert_nothing_is_left, begin, finish

SETTING = ("train.steps=2", "rounds=1", "data.test_rows=4", "data.validation_rows=4")
OUTSIDE = ("method=half-fedavg", "head=scaled-linear", "uplink=clip,sign")
FIRST = registries.CODECS.reserved
ALL_CODECS = (*FIRST, *sorted({*BUILT_IN_CODECS, "rounded", "sign"} - set(FIRST)))


@pytest.fixture
def words(installed, backbone_folder, data_folder) -> list[str]:
    """Words of a tiny run; neither method nor tuner nor aggregation is chosen."""
    return [
        f"backbone={backbone_folder('bert')}",
        f"data.path={data_folder}",
        "data.tasks=[alpha,beta]",
        "data.merge=false",
        "precision=fp32",
        "threads=1",
        "train.max_length=32",
        *SETTING,
    ]


HEAD_FIRST = {"head_rounds": 0, "head_lr": None}
"""Options of every method."""


def test_the_defaults_of_a_method_and_all_options_take_effect(words) -> None:
    config = silotune.read_config("demo", [*words, *OUTSIDE])
    assert (config.tuner.name, config.aggregation.name) == ("offset", "midrange")
    assert (config.method.options, config.tuner.options) == (HEAD_FIRST | {"factor": 0.5}, {"scale": 2.0})
    assert config.head.options == {"factor": 3.0}
    options = ("aggregation=shrunk-mean", "aggregation.factor=0.5", "uplink=rounded", "uplink.step=0.01")
    changed = silotune.read_config("demo", [*words, *OUTSIDE, *options, "head.factor=2", "method.factor=2"])
    assert (changed.aggregation.options, changed.uplink.options) == ({"factor": 0.5}, {"step": 0.01})
    assert (changed.head.options, changed.method.options) == ({"factor": 2.0}, HEAD_FIRST | {"factor": 2.0})
    assert yaml.safe_load(dump(changed))["aggregation"]["factor"] == 0.5
    built_in = silotune.read_config("demo", [*words, *OUTSIDE, *options[:2]], ["aggregation=median", "uplink=int8"])
    assert (built_in.aggregation.options, built_in.uplink.options) == ({}, {})


def test_run_resume_and_load(words, tmp_path) -> None:
    options = ("aggregation=shrunk-mean", "aggregation.factor=0.5")
    finished = silotune.run("demo", *words, *OUTSIDE, *options, out=tmp_path / "run")
    assert finished.summary["method"] == "half-fedavg"
    assert any(bool(tensor.any()) for tensor in finished.federation.coordinator.shared["global"].values())
    again = silotune.run("demo", *words, *OUTSIDE, *options, out=tmp_path / "run", resume=True)
    assert again.summary["state_sha256"] == finished.summary["state_sha256"]
    opened = silotune.load_run(tmp_path / "run")
    assert opened.model("alpha").predict(["a kind letter"]) == finished.model("alpha").predict(["a kind letter"])
    half = silotune.run("demo", *words, *OUTSIDE, *options, "aggregation.factor=1", out=tmp_path / "other")
    assert half.summary["shared_sha256"] != finished.summary["shared_sha256"]


def test_a_kind_of_task(words, tmp_path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(("text,label", *(f"text {n},{n % 2}" for n in range(24)))))
    silo = {"name": "a", "path": str(tmp_path / "a.csv"), "kind": "graded", "labels": ["0", "1"], "task": "grade"}
    (tmp_path / "silos.yaml").write_text(yaml.safe_dump({"silos": [silo, silo | {"name": "b"}]}))
    own = [word for word in words if not word.startswith("data.")]
    finished = silotune.run(str(tmp_path / "silos.yaml"), *own, "method=fedavg", "head=linear", out=tmp_path / "run")
    assert finished.summary["silos"]["a"]["metric"] == "balanced_accuracy"


@pytest.mark.usefixtures("no_figures")
def test_compare(words, tmp_path) -> None:
    compared(words, tmp_path, workers=1)


@pytest.mark.long
@pytest.mark.usefixtures("no_figures")
def test_compare_in_two_processes(words, tmp_path) -> None:
    assert compared(words, tmp_path, workers=1) == compared(words, tmp_path, workers=2)


def compared(words: list[str], folder: Path, workers: int) -> dict[str, str]:
    """Compare the package's method with a built-in one; return the digests of the final states by cell."""
    out = folder / f"compared-{workers}"
    more = [word for word in OUTSIDE if not word.startswith("method=")]
    summaries = silotune.compare(
        "demo", *words, *more, methods=["half-fedavg", "centralised"], seeds=[1], out=out, workers=workers
    )
    assert set(summaries) == {"half-fedavg-1", "centralised-1"}
    assert (out / "table.csv").read_text().count("half-fedavg") == 3
    assert (out / "report.html").is_file()
    config = yaml.safe_load((out / "half-fedavg-1" / "config.yaml").read_text())
    assert (config["tuner"]["name"], config["aggregation"]["name"]) == ("offset", "midrange")
    return {name: summary["state_sha256"] for name, summary in summaries.items()}


@pytest.mark.long
def test_workers_of_one_run(words, tmp_path) -> None:
    digests = {
        silotune.run("demo", *words, *OUTSIDE, out=tmp_path / f"{workers}", workers=workers).summary["state_sha256"]
        for workers in (1, 2)
    }
    assert len(digests) == 1


@pytest.mark.long
def test_over_flower(words, tmp_path) -> None:
    config = silotune.read_config("demo", [*words, *OUTSIDE])
    expected = silotune.run(config, out=tmp_path / "whole").summary
    process, out = begin(config, tmp_path)
    said = finish(process)
    assert process.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert_nothing_is_left(out)


def test_commands_list_them(installed, silotune) -> None:
    outcome = silotune("methods", "--json")
    assert outcome.code == 0
    entry = next(entry for entry in json.loads(outcome.out) if entry["method"] == "half-fedavg")
    assert entry == {"method": "half-fedavg", "paper": "an example", "options": HEAD_FIRST | {"factor": 0.5}}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("tuner=prompt", "tuner=prompt: method half-fedavg is not defined for it; allowed: lora, offset"),
        ("tuner.scale=x", "tuner.scale: must be a valid number"),
        ("tuner.skale=1", "unknown key 'tuner.skale' (did you mean 'tuner.scale'?)"),
        (
            "aggregation.factor=2",
            "factor belongs to aggregation=shrunk-mean, not to aggregation=midrange; leave aggregation.factor out",
        ),
        ("aggregation={name: shrunk-mean, factor: 2}", "aggregation.factor: must be less than or equal to 1"),
        ("aggregation={name: shrunk-mean, trim: 0.2}", "trim belongs to aggregation=trimmed-mean, not to"),
        ("uplink={name: rounded, step: -1}", "uplink.step: must be greater than 0"),
        ("uplink={name: sign, step: 1}", "step belongs to uplink=rounded, not to uplink=sign; leave uplink.step out"),
        ("uplink={name: sign, stop: 1}", "unknown key 'uplink.stop'"),
        ("uplink={name: sign, rounding: nearest}", "rounding belongs to uplink=int8 or uplink=int4"),
        ("uplink=sign,int8", f"then one of {', '.join(ALL_CODECS)} (got sign,int8)"),
        ("aggregation=midrang", "'ifca', 'midrange', 'q-fedavg' or 'shrunk-mean' (got 'midrang')"),
        (
            "head=scaled",
            "must be 'mlp', 'linear', 'verbalizer', 'lm', 'dpo', 'entities', 'retrieval' or 'scaled-linear' (got ",
        ),
        ("method=halffedavg", "unknown method 'halffedavg' (did you mean 'half-fedavg'?)"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(words, more, line) -> None:
    with pytest.raises(InputError) as error:
        silotune.read_config("demo", [*words, *OUTSIDE, more])
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("module", "value", "reason"),
    [
        ("import nowhere_at_all", "broken:Method", "cannot be imported (ModuleNotFoundError: No module named 'nowhere"),
        ("x = 1", "broken:Method", "cannot be imported (AttributeError: module 'broken' has no attribute 'Method'"),
        ("x = 1", "broken:x", "method 'mine': must be a subclass of Method (got 1)"),
        ("raise ValueError('two\\nlines')", "broken", "cannot be imported (ValueError: two lines)"),
        ("raise SystemExit(0)", "broken", "cannot be imported (SystemExit: 0)"),
        ("x = 1", "not a name", "cannot be imported ("),
        (
            "from silotune.methods import Supervised\nclass Mine(Supervised):\n    name = 'fedavg'",
            "broken:Mine",
            "method 'fedavg': there is one of this name already; choose another name",
        ),
    ],
)
def test_a_broken_package_is_named_in_a_line(site: Path, silotune, monkeypatch, module, value, reason) -> None:
    monkeypatch.delitem(__import__("sys").modules, "broken", raising=False)
    (site / "broken.py").write_text(module)
    install(site, {"silotune.methods": {"mine": value}}, "silotune-broken")
    where = f"entry point 'mine' = '{value}' of group silotune.methods (package silotune-broken): "
    silotune("run", "demo", "method=mine", "--out", site / "run").refusal(where + reason)
