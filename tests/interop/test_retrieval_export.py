"""Exports of models that find passages: opened by sentence-transformers and the loader, with equal vectors."""

from __future__ import annotations

import json

import pytest
import torch

from silotune.interop.export import export
from silotune.interop.onnx_model import onnx_logits
from tests.support.small_runs import SINGLE, carried_along, close


@pytest.mark.parametrize(("tuner", "part"), [("lora", "global"), ("lora", "merged"), ("bottleneck", "global")])
def test_vectors_are_the_runs(runs, tuner, part, tmp_path):
    run = runs.retrieval("bert", tuner)
    expected = run.model("beta").embed(SINGLE)
    assert export(run.model("beta"), part, tmp_path / "out", str(runs.model("bert")))["comparison"]["same_answers"] == 4
    loader = carried_along(tmp_path / "out").load(tmp_path / "out")
    close(loader.logits(SINGLE), expected)
    assert loader.predict(SINGLE)[0]["vector"] == pytest.approx(expected[0].tolist(), abs=1e-5)
    if tuner == "bottleneck":  # which has a layout of its own
        assert not (tmp_path / "out" / "modules.json").exists()
        return
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model.max_seq_length == json.loads((tmp_path / "out" / "head.json").read_text())["max_length"]
    close(torch.from_numpy(model.encode(SINGLE)), expected)


@pytest.mark.long
def test_an_onnx_graph_gives_vectors(runs, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    run = runs.retrieval("bert", "lora")
    export(run.model("beta"), "merged", tmp_path / "out", program="onnx")
    close(onnx_logits(tmp_path / "out", SINGLE), run.model("beta").embed(SINGLE))
