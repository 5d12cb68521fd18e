"""Which scores `scores.json` has for which kind of rows."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn import metrics as library

from silotune.data.scores import Classified
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.predict import Measured
from silotune.evaluation.score_details import Bootstrap, label_details, score_details

ANSWERS = Task("answers", (), "rouge1", kind="generation")
BOOTSTRAP = Bootstrap(50, 1, "t")


def written_rows(answers: list[str] | None, **fields: bool) -> TokenizedRows:
    return TokenizedRows(ANSWERS, [[1, 2]] * 4, None, torch.zeros(4, dtype=torch.int64), answers=answers, **fields)


def metrics(measured: Measured, rows: TokenizedRows) -> dict[str, float]:
    details = score_details(measured, rows, BOOTSTRAP)
    assert details is not None
    return details["metrics"]


def test_written_answers_have_shares_of_words_and_perplexity():
    rows = written_rows(["a b", "c", "d e", "f"])
    found = metrics(Measured(50.0, written=["a b", "c", "x", "y"], loss=2.0), rows)
    assert found == pytest.approx(
        {"rouge1": 50, "rougeL": 50, "exact_match": 50, "loss": 2.0, "perplexity": math.exp(2)}
    )


def test_a_loss_alone_needs_no_answers():
    assert metrics(Measured(2.0, loss=2.0), written_rows(["a"] * 4)) == {"loss": 2.0, "perplexity": math.exp(2)}
    assert metrics(Measured(2.0, written=["a"] * 4), written_rows(None)) == {}


def test_pairs_have_no_perplexity():
    assert metrics(Measured(0.5, loss=0.5), written_rows(None, sizes=[2, 2])) == {"loss": 0.5}


def test_the_area_has_its_interval_where_it_is_the_metric():
    draws = torch.Generator().manual_seed(4)
    rows = Classified(torch.randn(40, 2, generator=draws), torch.arange(40) % 2, -1)
    found = label_details(rows, Task("t", ("a", "b"), "auroc"), BOOTSTRAP)
    assert found["metrics"]["auroc"] == pytest.approx(
        100 * library.roc_auc_score(rows.labels, rows.probabilities[:, 1])
    )
    assert found["intervals"]["auroc"] == BOOTSTRAP.of_areas(rows)
    one_class = Classified(rows.logits, torch.zeros(40, dtype=torch.int64), -1)
    assert "auroc" not in label_details(one_class, Task("t", ("a", "b"), "auroc"), BOOTSTRAP)["intervals"]
