"""`baselines`: scores of the most frequent label and of a bag of words, by scikit-learn, on the same rows."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from silotune.data.metrics import METRICS, Classified
from silotune.data.tasks import Row, SiloData, Task

MAJORITY, BAG_OF_WORDS = "majority", "bag_of_words"

MOST_ROWS = 20_000
"""Training rows that a baseline learns from, the first ones of the (shuffled) split."""

MOST_WORDS = 50_000
"""Words and pairs of words that the bag counts."""

MOST_SILOS = 200
"""Silos up to which each has baselines of its own."""

MOST_KNOWN = 1000
"""Scores that a process keeps: runs that are compared have the same rows."""

Scores = dict[str, float | None]

_known: dict[bytes, Scores] = {}
"""Digest of a task and its rows → scores."""


def baselines(silos: Sequence[SiloData], central: bool) -> dict[str, Any]:
    """Score the baselines of all silos on their test rows, by their tasks' metrics.

    Args:
        silos: the silos' rows.
        central: whether one data set is partitioned: one baseline then learns from all silos' training rows.

    Returns:
        `silos` (name → scores) and `global` (scores, or None); empty where rows have no labels or there are more than
        `MOST_SILOS` silos.
    """
    if central:
        train = [row for silo in silos for row in silo.splits.train]
        return {"silos": {}, "global": baseline_scores(silos[0].task, train, silos[0].splits.test) or None}
    if len(silos) > MOST_SILOS:
        return {"silos": {}, "global": None}
    scored = {silo.name: baseline_scores(silo.task, silo.splits.train, silo.splits.test) for silo in silos}
    return {"silos": {name: scores for name, scores in scored.items() if scores}, "global": None}


def baseline_scores(task: Task, train: Sequence[Row], test: Sequence[Row]) -> Scores:
    """Return baseline → score on test rows; empty where rows have no labels, or the metric is a loss.

    `majority` predicts the training rows' most frequent label. `bag_of_words` is logistic regression over the
    TF-IDF of words and pairs of neighboring words; it is missing if the texts hold no word.
    """
    if task.kind != "classification" or task.metric not in METRICS or not test or not train:
        return {}
    train = train[:MOST_ROWS]
    key = _digest(task, train, test)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            del _known[next(iter(_known))]  # the oldest
        _known[key] = _fit_and_score(task, train, test)
    return dict(_known[key])


def _digest(task: Task, train: Sequence[Row], test: Sequence[Row]) -> bytes:
    """Return the SHA-256 of what baselines see."""
    sha = hashlib.sha256(json.dumps(task.fields()).encode())
    for rows in (train, test):
        sha.update(f"{len(rows)} rows\n".encode())
        for row in rows:
            sha.update(json.dumps([row.label, row.texts]).encode())
    return sha.digest()


def _fit_and_score(task: Task, train: Sequence[Row], test: Sequence[Row]) -> Scores:
    from sklearn.dummy import DummyClassifier

    scores = {MAJORITY: _score(task, DummyClassifier(strategy="prior"), train, test)}
    if len({row.label for row in train}) > 1 and any(re.search(r"\w", text) for row in train for text in row.texts):
        scores[BAG_OF_WORDS] = _score(task, _bag_of_words(), train, test)
    return scores


def _bag_of_words() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b", max_features=MOST_WORDS)
    return make_pipeline(words, LogisticRegression(max_iter=200))


def _score(task: Task, model: Any, train: Sequence[Row], test: Sequence[Row]) -> float | None:
    """Fit a model of scikit-learn and score it."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline needs no last digit
        model.fit(_texts(train), [row.label for row in train])
    probabilities = np.zeros((len(test), len(task.labels)))
    probabilities[:, model.classes_] = model.predict_proba(_texts(test))
    logits = torch.from_numpy(np.log(np.maximum(probabilities, 1e-12)))
    labels = torch.tensor([row.label for row in test])
    return METRICS[task.metric](Classified(logits, labels, task.positive_index))


def _texts(rows: Sequence[Row]) -> list[str]:
    """Return one text per row; the texts of a pair follow one another."""
    return ["\n".join(row.texts) for row in rows]
