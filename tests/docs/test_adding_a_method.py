"""docs/adding-a-method.md, done as it says: its file registers a method that runs, and is APFL."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from silotune.data.batching import make_batch
from silotune.data.cohort_batches import own_micro_batches
from silotune.methods import METHODS
from silotune.methods.base import Step
from silotune.runs.run import run

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


@pytest.fixture
def apfl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The document's file, imported; the method is forgotten after the test."""
    others = {name: method for name, method in METHODS.items() if name != "apfl"}  # it may be built in
    monkeypatch.setattr(METHODS, "_entries", others)
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert block.count("\n") <= 80
    file = tmp_path / "apfl.py"
    file.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("apfl_of_the_document", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert METHODS["apfl"] is module.APFL
    return module


def test_it_runs_and_only_the_global_adapter_travels(apfl, tiny_config, tmp_path: Path) -> None:
    finished = run(tiny_config("apfl", "rounds=1"), out=tmp_path / "run")
    parts = finished.federation.context.parts
    assert [name for name, part in parts.items() if part.scope == "shared"] == ["global"]
    assert finished.summary["sent_parameters"] * 2 == finished.summary["adapter_parameters"]
    learned = [float(silo.state.private["alpha"]["value"]) for silo in finished.federation.silos.values()]
    assert all(value != 0.5 for value in learned)
    assert finished.model("alpha").predict(["the morning was fine"])


@pytest.mark.parametrize(("start", "inside"), [(0.0, 0.3), (1.0, 0.7)])
def test_alpha_learns_from_the_edge_and_is_projected(apfl, tiny_config, tmp_path: Path, start, inside) -> None:
    """At and beyond an edge the weight is the edge, and its gradient is the one of an α inside."""
    for value, weight in [(start, start), (3 * start - 1, start), (inside, inside)]:
        tensor = torch.tensor(value, requires_grad=True)
        mixed = apfl.alpha({"alpha": {"value": tensor}})
        mixed.backward()
        assert mixed.item() == pytest.approx(weight)
        assert tensor.grad.item() == 1
    finished = run(tiny_config("apfl", "rounds=2", f"method.start={start}"), out=tmp_path / "run")
    learned = [float(silo.state.private["alpha"]["value"]) for silo in finished.federation.silos.values()]
    assert all(value != start for value in learned)


def test_each_gets_the_gradient_the_paper_gives_it(apfl, tiny_federation) -> None:
    """w: of CE(w) alone. v and α: of the mixture alone, w constant. α against a finite difference."""
    federation = tiny_federation("apfl", "method.start=0.3")
    training, silo = federation.context, federation.silos["alpha"]
    draws = torch.Generator().manual_seed(0)
    state = federation.coordinator.shared | training.state_of(silo).private
    state = {
        part: {k: (v + 0.05 * torch.randn(v.shape, generator=draws) if v.dim() else v.clone()) for k, v in t.items()}
        for part, t in state.items()
    }
    batch = make_batch(silo.train["alpha"], range(8), 0)
    (phase,) = training.phases

    def loss_of(view: str, change: float = 0.0, grad: bool = True) -> tuple[torch.Tensor, dict]:
        parts = {p: {k: v.clone().requires_grad_(grad) for k, v in t.items()} for p, t in state.items()}
        if change:
            parts["alpha"]["value"] = (state["alpha"]["value"] + change).requires_grad_(grad)
        mixes = {n: training.resolve(m, parts, {}, {}) for n, m in phase.views.items()}
        separately = [training.views([batch], own_micro_batches(batch), [{n: mix}]) for n, mix in mixes.items()]
        views = {n: view for (computed,) in separately for n, view in computed.items()}
        step = Step(batch, views, parts, {}, {}, training.parts)
        return (phase.loss(step) if view == "both" else step.cross_entropy(view, f"head_{view}")), parts

    both, joint = loss_of("both")
    both.backward()
    own, alone = loss_of("global")
    own.backward()
    mixed, personal = loss_of("mixture")
    mixed.backward()
    for name in joint["global"]:
        torch.testing.assert_close(joint["global"][name].grad, alone["global"][name].grad)
        assert personal["global"][name].grad is None
        torch.testing.assert_close(joint["private"][name].grad, personal["private"][name].grad)
    step = 1e-2
    slope = (loss_of("mixture", step)[0] - loss_of("mixture", -step)[0]).item() / (2 * step)
    assert joint["alpha"]["value"].grad.item() == pytest.approx(slope, rel=2e-2, abs=1e-5)
