"""The public names: listed, typed, and loaded on first use."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import silotune

ROOT = Path(__file__).parents[2]

SCRIPT = """
from torch import Tensor

from silotune import Config, Method, MethodOptions, Part, Phase, Step, compare, load_run, read_config, run, shared
from silotune import frozen, previous, received, register_aggregation, register_codec, register_head, register_method
from silotune import evaluate, partition, report, sweep, transfer
from silotune.config import SiloConfig, TrainConfig
from silotune.methods import GLOBAL, HEAD, PredictionMix, Tensors
from silotune.aggregation import Update
from collections.abc import Iterable


class MineOptions(MethodOptions):
    weight: float = 1.0


@register_method
class Mine(Method):
    name = "mine"
    paper = "mine"
    Options = MineOptions
    tuners = ("lora",)

    def parts(self) -> dict[str, Part]:
        return {GLOBAL: shared(self.setting.tuner), HEAD: self.head()}

    def phases(self) -> list[Phase]:
        return [Phase("train", trains=(GLOBAL, HEAD), views={"full": {GLOBAL: 1}}, loss=self.loss)]

    def loss(self, step: Step) -> Tensor:
        return step.cross_entropy("full")

    def prediction(self) -> PredictionMix:
        return PredictionMix({GLOBAL: 1})


@register_aggregation("first")
def first(updates: Iterable[Update]) -> Tensors:
    return next(iter(updates)).tensors


config: Config = read_config("demo", ["method=mine"])
finished = run(config, out="run")
label: str = load_run("run").model("alpha").predict(["good"])[0].label
averages = [summary["average"] for summary in compare("demo", methods=["mine"], seeds=[1], out="compared").values()]
typed = Config(rounds=2, train=TrainConfig(lr=1e-3), silos=[SiloConfig(name="a", path="a.csv")])
again = run("demo", method="fedmcp", rounds=2, train={"lr": 1e-3}, head="linear", data={"seed": 1}, out="again")
tables = run("", silos={"a": [{"text": "good", "label": 1}]}, uplink="clip,laplace", backbone="default")
swept = sweep("demo", search={"train.lr": [1e-3, 1e-2], "tuner.r": "2..16:log"}, out="swept")
best: float | None = swept.best["mine"].score
matrices = transfer([again, "other"], "matrix", head="source").matrices
page = report([again, "other"], "page.html").path.name
sizes = partition("sentiment5", partition={"name": "dirichlet", "alpha": 0.5}).counts["silo-1"]
right = evaluate(again, "a", "rows.csv", text=["first", "second"]).score
made: type[Mine] = Mine
"""


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_every_name_is_there_and_is_listed() -> None:
    for name in silotune.__all__:
        assert getattr(silotune, name) is not None
    assert set(silotune.__all__) <= set(dir(silotune))
    assert {name for name in dir(silotune) if not name.startswith("__")} < set(silotune.__all__)
    assert len(set(silotune.__all__)) == len(silotune.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        silotune.runn  # noqa: B018


def test_names_are_listed_before_they_are_loaded_and_documented() -> None:
    names, completed = fresh(
        "import silotune, sys, rlcompleter; print(dir(silotune)); assert 'torch' not in sys.modules;"
        "c = rlcompleter.Completer({'silotune': silotune});"
        "print(c.complete('silotune.Conf', 0))"
    ).splitlines()
    assert all(repr(name) in names for name in silotune.__all__)
    assert "silotune.Config" in completed
    said = pydoc.plain(pydoc.render_doc(silotune))
    assert all(name in said for name in silotune.__all__ if name != "__version__")
    assert f"VERSION\n    {silotune.__version__}" in said


def test_importing_the_package_is_cheap() -> None:
    heavy = fresh(
        "import sys; before = set(sys.modules); import silotune;"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    for name in ("torch", "pydantic", "transformers", "yaml", "numpy", "importlib.metadata"):
        assert f"'{name}'" not in heavy


@pytest.mark.long
def test_a_script_passes_mypy_strict(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--strict", "--config-file=", "--ignore-missing-imports", f"--cache-dir={tmp_path / 'cache'}", "script.py"]
    environment = {"MYPYPATH": str(ROOT / "src"), "PATH": ""}

    def checked() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mypy", "--follow-imports=silent", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = checked()
    assert done.returncode == 0, done.stdout
    (tmp_path / "script.py").write_text(SCRIPT.replace("made: type[Mine] = Mine", "import silotune\nsilotune.runn"))
    wrong = ('train={"rl": 1e-3}', 'train={"lr": "high"}', "round=2", 'silos=[{"file": "a.csv"}]')
    right = (tmp_path / "script.py").read_text().rstrip()
    (tmp_path / "script.py").write_text("\n".join([right, *(f'run("demo", {keys})' for keys in wrong)]))
    said = checked().stdout
    assert "has no attribute" in said
    first = len(right.splitlines()) + 1
    assert all(f"script.py:{first + place}:" in said for place in range(len(wrong))), said
