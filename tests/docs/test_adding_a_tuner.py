"""docs/adding-a-tuner.md, done as it says: its file registers a tuner that trains, and is LoHa."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from silotune.models.tuners import TUNERS
from silotune.runs.run import run
from tests.support import tuner_families as families

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding-a-tuner.md"


@pytest.fixture
def my_loha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The document's file, imported; the tuner is forgotten after the test."""
    monkeypatch.setattr(TUNERS, "_entries", dict(TUNERS))
    block = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]
    file = tmp_path / "my_loha.py"
    file.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_loha_of_the_document", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert TUNERS["my-loha"] is module.MyLoHa
    return module.MyLoHa


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
