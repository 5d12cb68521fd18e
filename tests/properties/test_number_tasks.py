"""Every method trains silos whose rows have numbers, or refuses them in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from silotune import run
from silotune.errors import InputError
from silotune.methods import METHODS

LABELED_AT_THE_COORDINATOR = {"server-only", "fedfame", "fedavg-server"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    for silo in ("a", "b"):
        (folder / silo).mkdir()
        (folder / silo / "meta.json").write_text('{"kind": "regression"}', encoding="utf-8")
        moods = ("cold", "warm")
        rows = [{"sentence1": f"the garden was {moods[n % 2]} {n}", "label": n % 2 + n / 40} for n in range(20)]
        (folder / silo / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_numbers_are_learned_by_every_method_that_trains_in_silos(method, data, tmp_path, backbone_folder):
    words = [f"method={method}", "head=mlp", "head.scope=private", "train.max_length=32", "threads=1", "precision=fp32"]
    words += [f"data.path={data}", "data.tasks=[a,b]", "data.task=t", "data.merge=true", "rounds=2", "train.steps=1"]
    words += [f"backbone={backbone_folder('bert')}", "train.batch_size=4", "evaluation.baselines=false"]
    if method == "fedproto":
        with pytest.raises(InputError, match=r"^method=fedproto: silo 'a' holds texts with numbers; allowed"):
            run("", *words, out=tmp_path / "run")
        return
    if method in LABELED_AT_THE_COORDINATOR:
        with pytest.raises(InputError, match=f"^method={method}: .* rows of one label each, and silo 'a' holds texts"):
            run("", *words, out=tmp_path / "run")
        return
    summary = run("", *words, out=tmp_path / "run").summary
    scores = [silo["test"] for silo in summary["silos"].values()]
    assert all(score is not None and math.isfinite(score) and abs(score) <= 100 for score in scores)
