"""Evaluation does not depend on how its rows are cut into batches, nor on what was evaluated before."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from invariants.cases import CASES, every_case
from silotune.evaluation import predict
from silotune.evaluation.scores import state_of


@every_case
def test_one_batch_gives_what_many_batches_give(reference, case, monkeypatch):
    run, _ = reference(case)
    federation = run.federation
    for silo in federation.silos.values():
        state = state_of(federation, silo)
        for name, evaluation in silo.evaluations.items():
            monkeypatch.setattr(predict, "BATCH", 10_000)
            whole = predict.logits(federation.training, state, evaluation.test)
            monkeypatch.setattr(predict, "BATCH", 1)  # one row at a time: without any padding
            pieces = predict.logits(federation.training, state, evaluation.test)
            torch.testing.assert_close(pieces, whole, rtol=0, atol=2e-6)
            monkeypatch.setattr(predict, "BATCH", 4)
            assert predict.score(federation.training, state, evaluation.test) == run.silos[name]["test"]


@every_case
def test_reported_scores_are_those_of_predictions_on_the_files_texts(reference, silos_folder, case):
    """The public way in, texts in the files' order, against labels read with `json`; the metric by hand."""
    run, _ = reference(case)
    folder = silos_folder / ("alike" if CASES[case].one_task else "unlike")
    for name, reported in run.silos.items():
        meta = json.loads((folder / name / "meta.json").read_text())
        model = run.model(name)
        for split in ("validation", "test"):
            lines = (folder / name / f"{split}.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            texts = [(row["sentence1"], row["sentence2"]) if "sentence2" in row else row["sentence1"] for row in rows]
            predictions = model.predict(texts)
            assert all(sum(found.probabilities.values()) == pytest.approx(1, abs=1e-6) for found in predictions)
            labels = [meta["label_names"][row["label"]] for row in rows]
            right = [found.label == label for found, label in zip(predictions, labels, strict=True)]
            assert reported[split] == pytest.approx(100 * np.mean(right), abs=1e-9)
            assert reported["rows"][split] == len(lines)
