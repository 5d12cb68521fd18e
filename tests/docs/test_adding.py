"""docs/adding-a-method.md, -tuner.md and -kind.md, done as they say: their files register what runs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from silotune.cli.result_table import _baseline_columns
from silotune.data.batching import make_batch
from silotune.data.kinds import KINDS
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.evaluation.baselines import baseline_scores
from silotune.methods import METHODS
from silotune.models.tuners import TUNERS
from silotune.runs.run import run
from tests.support import tuner_families as families
from tests.support.numeric_rig import doubled, make_step, random_parts, trained

ONE_TASK = ("data.tasks=[alpha]", "partition=iid", "partition.silos=2", "head=linear", "head.scope=shared")


@contextmanager
def file_of(page: str, registry, tmp_path: Path) -> Iterator:
    """The page's file, imported; what it registers is forgotten at the end."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert block.count("\n") <= 80
    file = tmp_path / "added.py"
    file.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"added_by_{page}", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._registered))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def fedrod(tmp_path: Path):
    with file_of("adding-a-method.md", METHODS, tmp_path) as module:
        assert METHODS["fedrod"] is module.FedRoD
        yield


@pytest.fixture
def my_loha(tmp_path: Path):
    with file_of("adding-a-tuner.md", TUNERS, tmp_path) as module:
        assert TUNERS["my-loha"] is module.MyLoHa
        yield module.MyLoHa


@pytest.fixture
def ordinal(tmp_path: Path):
    with file_of("adding-a-kind.md", KINDS, tmp_path) as module:
        assert KINDS["ordinal"] is module.Ordinal
        yield module.Ordinal()


@pytest.mark.usefixtures("fedrod")
def test_it_runs_and_the_personal_head_stays(tiny_config, tmp_path: Path) -> None:
    finished = run(tiny_config("fedrod", "rounds=1", *ONE_TASK), out=tmp_path / "run")
    parts = finished.federation.context.parts
    assert [name for name, part in parts.items() if part.scope == "shared"] == ["global", "head_generic"]
    summary = finished.summary
    assert summary["sent_parameters"] == summary["adapter_parameters"] + summary["head_parameters"] // 2
    silo = next(iter(finished.federation.silos))
    assert finished.model(silo).predict(["the morning was fine"])


@pytest.mark.usefixtures("fedrod")
def test_each_part_gets_the_gradient_the_paper_gives_it(tiny_federation) -> None:
    """By NumPy: of the logits of both losses; and no part gets the other one's."""
    federation = doubled(tiny_federation("fedrod", *ONE_TASK))
    silo = next(iter(federation.silos.values()))
    state = random_parts(federation, silo)
    (rows,) = silo.train.values()
    batch, (phase,) = make_batch(rows, range(8), 0), federation.context.phases
    leaves = trained(state, phase)
    step = make_step(federation.context, phase, batch, state, {})
    loss = phase.loss(step)
    loss.backward()

    x = step.views["generic"][federation.method.setting.head.pooling].detach().numpy()
    names = ("alpha.out.weight", "alpha.out.bias")
    generic, personal = ([state[part][n].detach().numpy() for n in names] for part in ("head_generic", "head_personal"))
    counts, labels = np.bincount(rows.labels.numpy(), minlength=len(rows.task.labels)), batch.labels.numpy()
    onehot = np.eye(len(counts))[labels]

    def softmax(logits: np.ndarray) -> np.ndarray:
        raised = np.exp(logits - logits.max(1, keepdims=True))
        return raised / raised.sum(1, keepdims=True)

    balanced = softmax(x @ generic[0].T + generic[1] + np.log(counts))
    both = softmax(x @ (generic[0] + personal[0]).T + generic[1] + personal[1])
    expected = -np.log((balanced * onehot).sum(1)).mean() - np.log((both * onehot).sum(1)).mean()
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    for part, answer in (("head_generic", balanced), ("head_personal", both)):
        np.testing.assert_allclose(leaves[f"{part}/{names[0]}"].grad, (answer - onehot).T @ x / 8, atol=1e-12)
    adapter = {name: leaf for name, leaf in leaves.items() if name.startswith("global/")}
    again = make_step(federation.context, phase, batch, state, {})
    own = torch.nn.functional.cross_entropy(
        again.logits("generic", "head_generic") + torch.tensor(np.log(counts)), batch.labels
    )
    for leaf, gradient in zip(adapter.values(), torch.autograd.grad(own, [*adapter.values()]), strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=1e-12)


def test_it_is_trained_and_sent(my_loha, tiny_config, tmp_path: Path) -> None:
    finished = run(tiny_config("fedmatch", "tuner=my-loha", "tuner.r=2", "rounds=1"), out=tmp_path / "run")
    assert finished.summary["sent_parameters"] > 0
    silo = next(iter(finished.federation.silos))
    assert finished.model(silo).predict(["the morning was fine"])


def test_it_is_loha(my_loha) -> None:
    backbone, inputs = families.shared_backbone("bert", double=True), families.batch("bert")
    tuner, built_in = my_loha(my_loha.Options(r=3)), TUNERS["loha"](TUNERS["loha"].Options(r=3, alpha=3))
    part = families.random_part(tuner, backbone)
    names = dict(zip(my_loha.module_tensors, built_in.module_tensors, strict=True))
    same = {f"{module}.{names[name]}": t for key, t in part.items() for module, _, name in [key.rpartition(".")]}
    expected = families.run(backbone, inputs, (built_in, [(same, 0.7)]))
    torch.testing.assert_close(families.run(backbone, inputs, (tuner, [(part, 0.7)])), expected, rtol=0, atol=1e-12)
    assert (expected - families.run(backbone, inputs)).abs().max() > 1e-3


LEVELS = {"mild": "cold grey stone", "moderate": "a plain road", "severe": "sweet bright garden"}


@pytest.mark.usefixtures("ordinal")
def test_a_kind_has_its_own_metric_and_less_may_be_better(backbone_folder, tmp_path: Path) -> None:
    for name in ("north", "south"):
        lines = [f"{LEVELS[label]} {number},{label}" for number in range(8) for label in LEVELS]
        (tmp_path / f"{name}.csv").write_text("\n".join(("text,label", *lines)))
    page = (Path(__file__).parents[2] / "docs" / "adding-a-kind.md").read_text(encoding="utf-8")
    silos = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])["silos"]
    silos = [silo | {"path": str(tmp_path / silo["path"])} for silo in silos]
    words = (
        f"backbone={backbone_folder('bert')}",
        "method=fedavg",
        "head=linear",
        "rounds=1",
        "train.steps=2",
        "precision=fp32",
    )

    def finish(name: str, metric: str | None):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"silos": [silos[0] | ({"metric": metric} if metric else {}), silos[1]]}))
        return run(str(file), *words, out=tmp_path / name)

    finished = finish("run", None)
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())["silos"]["north"]
    assert {"distance", "accuracy"} <= scores["metrics"].keys() & scores["intervals"].keys()
    assert finished.summary["silos"]["north"]["metric"] == "distance"
    assert 0 <= finished.summary["silos"]["north"]["test"] <= 2
    assert finished.federation.lower_is_better
    with pytest.raises(InputError, match=r"silos\.north\.metric: must be .* or 'distance' \(got 'distanse'\)"):
        finish("other", "distanse")


def test_own_baselines_stand_in_tables_by_their_title(ordinal, monkeypatch) -> None:
    kind, rows = type(ordinal), [Row(("a plain road",), 1), Row(("cold grey stone",), 0)]
    monkeypatch.setattr(kind, "own_baselines", lambda *_: {"middle": 1.5})
    task = Task("pain", tuple(LEVELS), "distance", "ordinal")
    with pytest.raises(InputError, match=r"kind ordinal: `baselines` has no title for middle"):
        baseline_scores(task, rows, rows)
    monkeypatch.setattr(kind, "baselines", {"middle": "always the middle"})
    summary = {"silos": {"north": {"metric": "distance", "test": 1.0}}, "average": 1.0, "sent_parameters": 0}
    summary["baselines"] = {"silos": {"north": baseline_scores(task, rows, rows)}}
    assert _baseline_columns(summary)["always the middle"]("north") == "1.5"


def test_a_kinds_loss_is_that_of_the_paper(ordinal) -> None:
    logits, labels = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), [3, 0, 2, 2, 1]
    odds = np.exp(logits.numpy())
    reached = np.cumsum(odds / odds.sum(1, keepdims=True), 1)
    expected = np.mean([np.sum((reached[row] - (np.arange(4) >= label)) ** 2) for row, label in enumerate(labels)])
    assert ordinal.loss(logits, torch.tensor(labels)).item() == pytest.approx(expected, abs=1e-12)
