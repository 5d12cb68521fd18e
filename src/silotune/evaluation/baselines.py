"""Score the most frequent label and a bag of words on the same rows, as baselines beside the models."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from silotune.data.generation_rows import lists_options
from silotune.data.rows import Row, SiloData
from silotune.data.scores import TEXT_SCORES, Scores, judge
from silotune.data.targets import target_tensor
from silotune.data.tasks import LOSS_METRICS, Task
from silotune.errors import InputError

MAJORITY, BAG_OF_WORDS = "majority", "bag_of_words"

MOST_ROWS = 20_000
"""Training rows that a baseline learns from, the first ones of the (shuffled) split."""

MOST_WORDS = 50_000
"""Words and pairs of words that the bag counts."""

MOST_SILOS = 200
"""Silos up to which each has baselines of its own."""

_known: dict[bytes, Scores] = {}
"""Digest of a task and its rows → scores, kept in a process: runs that are compared have the same rows."""


def baselines(silos: Sequence[SiloData], central: bool) -> dict[str, Any]:
    """Score the baselines of all silos on their test rows, by their tasks' metrics: `silos` (name → scores), `global`.

    Of a partitioned data set whose rows judge all silos alike (`central`), one baseline learns from all silos' training
    rows. Rows without labels, and more than `MOST_SILOS` silos, have none.
    """
    if central:
        train = [row for silo in silos for row in silo.splits.train]
        return {"silos": {}, "global": baseline_scores(silos[0].task, train, silos[0].splits.test) or None}
    if len(silos) > MOST_SILOS:
        return {"silos": {}, "global": None}
    scored = {
        silo.name: baseline_scores(silo.task, silo.splits.train, silo.splits.test, silo.weights.get("test"))
        for silo in silos
    }
    return {"silos": {name: scores for name, scores in scored.items() if scores}, "global": None}


def joined(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the baselines of two mappings as `baselines` makes them."""
    silos = {name: base["silos"].get(name, {}) | scores for name, scores in more["silos"].items()}
    return {
        "silos": {**base["silos"], **silos},
        "global": {**(base["global"] or {}), **(more["global"] or {})} or None,
    }


def baseline_scores(
    task: Task, train: Sequence[Row], test: Sequence[Row], weights: Sequence[float] | None = None
) -> Scores:
    """Return baseline → score on test rows; empty where rows have no labels and no options, or the metric is a loss.

    `majority` predicts the training rows' most frequent label (of several labels those that most rows have), `mean` the
    mean of their numbers. `bag_of_words` is logistic regression (for numbers ridge regression) over the TF-IDF of words
    and pairs of neighboring words; it is missing if the texts hold no word. A test row counts by the one of `weights`
    that its label has.
    """
    if task.metric in LOSS_METRICS or not test or not train:
        return {}
    if not task.labeled:
        if not all(map(lists_options, (*train[:MOST_ROWS], *test))):
            return {}
        answer = Counter(row.answer.strip() for row in train[:MOST_ROWS]).most_common(1)[0][0]
        return {MAJORITY: TEXT_SCORES[task.metric]([answer] * len(test), [row.answer for row in test])}
    train = train[:MOST_ROWS]
    key = _digest(task, train, test, weights)
    if key not in _known:
        of_rows = None if weights is None else torch.tensor(weights, dtype=torch.float64)[[row.label for row in test]]
        _known[key] = _fit_and_score(task, train, test, of_rows)
    return dict(_known[key])


def _digest(task: Task, train: Sequence[Row], test: Sequence[Row], weights: Sequence[float] | None) -> bytes:
    """Return the SHA-256 of the rows from which baselines are computed."""
    sha = hashlib.sha256(json.dumps([task.fields(), weights]).encode())
    for rows in (train, test):
        sha.update(f"{len(rows)} rows\n".encode())
        for row in rows:
            sha.update(json.dumps([row.known, row.texts]).encode())
    return sha.digest()


def _fit_and_score(task: Task, train: Sequence[Row], test: Sequence[Row], weights: torch.Tensor | None) -> Scores:
    from sklearn.dummy import DummyClassifier, DummyRegressor

    own: Scores | None = task.rules.own_baselines(task, train, test)
    if own is not None:
        if untitled := own.keys() - task.rules.baselines.keys():
            raise InputError(f"kind {task.kind}: `baselines` has no title for {', '.join(sorted(untitled))}")
        return own
    name = next(iter(task.rules.baselines), MAJORITY)
    if task.rules.outputs(task) != len(task.labels or [0]):  # an outside kind's outputs are not a logit of each label
        targets = target_tensor(task, train)
        constant_outputs = task.rules.constant_outputs(task, targets)[:1].expand(len(test), -1)
        judged = task.rules.judge(task, task.metric, constant_outputs, target_tensor(task, test))
        return {name: judged}
    constant = DummyClassifier(strategy="prior") if task.labels else DummyRegressor()
    scores = {name: _score(task, constant, train, test, weights)}
    if len({row.known for row in train}) > 1 and any(re.search(r"\w", text) for row in train for text in row.texts):
        scores[BAG_OF_WORDS] = _score(task, _bag_of_words(task), train, test, weights)
    return scores


def _bag_of_words(task: Task) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b", max_features=MOST_WORDS)
    model: Any = LogisticRegression(max_iter=200) if task.labels else Ridge()
    return make_pipeline(words, OneVsRestClassifier(model) if task.labels and not task.rules.one_label else model)


def _score(
    task: Task, model: Any, train: Sequence[Row], test: Sequence[Row], weights: torch.Tensor | None
) -> float | None:
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline needs no last digit
        warnings.filterwarnings("ignore", message="Label .* is present in", category=UserWarning)
        model.fit(_texts(train), target_tensor(task, train).numpy())
    logits = torch.from_numpy(_logits(task, model, _texts(test)))
    return judge(task, task.metric, logits, target_tensor(task, test), weights)


def _logits(task: Task, model: Any, texts: Sequence[str]) -> Any:
    """Return a fitted model's predictions as a head's logits, shape (rows, outputs)."""
    if not task.labels:
        return np.asarray(model.predict(texts), dtype=float).reshape(-1, 1)
    chances = model.predict_proba(texts)
    if not task.rules.one_label:
        if isinstance(chances, list):  # one array of no and yes for each label; of a single class where all rows agree
            shares = [
                of[:, list(classes).index(1)] if 1 in classes else 0 * of[:, 0]
                for of, classes in zip(chances, model.classes_, strict=True)
            ]
            chances = np.stack(shares, 1)
        chances = np.clip(chances, 1e-12, 1 - 1e-12)
        return np.log(chances) - np.log1p(-chances)
    probabilities = np.zeros((len(texts), len(task.labels)))
    probabilities[:, model.classes_] = chances
    return np.log(np.maximum(probabilities, 1e-12))


def _texts(rows: Sequence[Row]) -> list[str]:
    """Return one text per row; the texts of a pair follow one another."""
    return ["\n".join(row.texts) for row in rows]
