"""Evaluation does not depend on how its rows are cut into batches, nor on what was evaluated before."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from silotune.evaluation import predict
from silotune.evaluation.federation_scores import current_model_state
from silotune.evaluation.instance_vectors import weigh, with_instances
from silotune.evaluation.joint import joint_logits
from tests.support.method_cases import CASES, KINDS, every_case, of_kinds

MIXED = ("apfl", "fdlora", "feddpa-t, dropout", "fedproto", "ifca", "fedmcp, entities", "fedmcp, retrieval")
"""Cases of `make test`: mixes that silos learn, of two parts and of each text; heads of three kinds, and no tuner."""


def moved_away(state, draws):
    """Move parts far from their initial values, so that another mix predicts something else."""
    return {
        part: {name: tensor + 0.3 * torch.randn(tensor.shape, generator=draws) for name, tensor in tensors.items()}
        for part, tensors in state.items()
    }


@pytest.mark.parametrize("case", of_kinds(CASES, MIXED))
def test_rows_keep_their_own_mix_in_any_batch(reference, case, monkeypatch):
    """A row in a batch predicts what it predicts alone, without any padding; also with parts moved far apart.

    If texts have their own weights, the test notices weights that are assigned to other rows.
    """
    federation = reference(case)[0].federation
    training, draws = federation.context, torch.Generator().manual_seed(5)
    shared = moved_away(federation.coordinator.shared, draws)

    def logits(state, rows, batch):
        monkeypatch.setattr(training, "rows_scored", batch)
        return predict.logits(training, state, rows)

    for silo in federation.silos.values():
        trained, own = current_model_state(federation, silo), replace(silo, instances=None)
        state = with_instances(
            training, own, shared | training.fixed | moved_away(training.state_of(silo).private, draws)
        )
        for rows in (evaluation.test for evaluation in silo.evaluations.values()):
            torch.testing.assert_close(logits(trained, rows, 1), logits(trained, rows, 10_000), rtol=0, atol=2e-6)
            alone = logits(state, rows, 1)
            for batch in (4, 10_000):
                torch.testing.assert_close(logits(state, rows, batch), alone, rtol=1e-5, atol=2e-5)
            weights = weigh(training, state, rows)
            if weights is None:
                continue
            flipped = replace(weights, alpha=weights.alpha.flip(0))
            with monkeypatch.context() as patch:
                patch.setattr(predict, "weigh", lambda *_, flipped=flipped: flipped)
                assert (predict.logits(training, state, rows) - alone).abs().max() > 1e-3


@every_case
def test_silos_scored_in_one_forward_have_their_own_scores(reference, case):
    """With parts moved far apart, so that rows of another silo's model would have other logits."""
    federation = reference(case)[0].federation
    training, draws = federation.context, torch.Generator().manual_seed(6)
    models = []
    for silo in federation.silos.values():
        moved = moved_away(federation.coordinator.shared_of(silo.name) | training.state_of(silo).private, draws)
        state = with_instances(training, replace(silo, instances=None), current_model_state(federation, silo) | moved)
        models += [(state, evaluation.test) for evaluation in silo.evaluations.values()]
    together = [*joint_logits(training, models)]
    assert len(together) == len(models)
    if all(tuner.mixes_rows(training.backbone) for tuner in training.tuners) and not training.virtual_tokens:
        assert not any(logits is None for logits in together)
    for logits, (state, rows) in zip(together, models, strict=True):
        if logits is not None:
            torch.testing.assert_close(logits, predict.logits(training, state, rows), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", of_kinds([name for name in CASES if not CASES[name].rows], KINDS))
def test_reported_scores_are_those_of_predictions_on_the_files_texts(reference, silos_folder, case):
    """`predict` on the files' texts in their order, against labels read with `json`; the metric by hand."""
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
