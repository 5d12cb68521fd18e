"""`label_set_scores`: metrics of rows with several labels each, of one set of rows or of many resamples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from silotune.data.class_counts import ratio, roc_areas

Sets = NDArray[Any]


def label_set_scores(logits: Sets, true: Sets, drawn: Sets | None = None) -> dict[str, Sets]:
    """Score predicted sets of labels, in percent; a label is predicted where its logit is above 0.

    Args:
        logits: shape (rows, labels).
        true: whether a row has a label, shape (rows, labels).
        drawn: how often each row counts, shape (resamples, rows); None: each once.

    Returns:
        metric → scores, shape (resamples,): `micro_f1`, F1 of all pairs of row and label; `macro_f1`, the mean of the
        labels' F1; `accuracy`, the share of rows whose set is right as a whole; `auroc`, the mean over the labels that
        some rows have and some have not (NaN if there is none). F1 without any true or predicted label is 0.
    """
    true, said = true > 0, logits > 0
    drawn = np.ones((1, len(true))) if drawn is None else drawn.astype(float)
    hits, of_true, of_said = (drawn @ of.astype(float) for of in (true & said, true, said))
    areas = np.stack([roc_areas(drawn, true[:, label], logits[:, label]) for label in range(true.shape[1])])
    known = ~np.isnan(areas)
    scores = {
        "micro_f1": ratio(2 * hits.sum(1), of_true.sum(1) + of_said.sum(1)),
        "macro_f1": ratio(2 * hits, of_true + of_said).mean(1),
        "accuracy": drawn @ (true == said).all(1) / drawn.sum(1),
        "auroc": np.where(known.any(0), np.where(known, areas, 0).sum(0) / np.maximum(known.sum(0), 1), np.nan),
    }
    return {name: 100 * values for name, values in scores.items()}
