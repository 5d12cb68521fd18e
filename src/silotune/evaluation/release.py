"""Measure how much a finished model reveals about its training rows, before its release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from silotune.core.tensors import State
from silotune.data.batching import make_batch
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.instance_vectors import weigh
from silotune.evaluation.predict import answers
from silotune.training.prediction import PredictionContext, Predictor

CONFIDENCE = 0.95

ALARMS = 0.1
"""The share of rows never seen that an attacker may take for training rows."""


def row_losses(context: PredictionContext, state: State, rows: TokenizedRows, count: int | None = None) -> list[float]:
    """Return the own mean loss of each row, or of the first `count`, under a model."""
    weights = weigh(context, state, rows)
    predictor = Predictor(context, state, None if weights is None else weights.alpha)
    batches = (
        make_batch(rows, rows.sequences([row]), context.backbone.pad_id) for row in range(count or rows.examples)
    )
    return [float(predictor.loss(batch)) for batch in batches]


# -- canaries ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Audit:
    """What guesses of canaries' coins show (Steinke, Nasr and Jagielski 2023).

    Args:
        canaries: their number.
        right: how many coins were guessed.
        lower: a lower bound on ε, true with a probability of `CONFIDENCE`.
        most: the lower bound that right guesses of all coins would have shown.
    """

    canaries: int
    right: int
    lower: float
    most: float


def audit(losses: Sequence[float], present: Sequence[bool], delta: float) -> Audit:
    """Guess that the half of the canaries with the smaller loss was trained on, and bound ε by the right guesses.

    Args:
        losses: of each canary, under the finished model; the guesses are fixed by them alone.
        present: the coins.
        delta: δ of the guarantee.
    """
    count = len(losses)
    smaller = torch.tensor(losses).argsort(stable=True)[: count // 2].tolist()
    guesses = [row in {*smaller} for row in range(count)]
    right = sum(guess == coin for guess, coin in zip(guesses, present, strict=True))
    return Audit(count, right, lower_epsilon(count, right, delta), lower_epsilon(count, count, delta))


def lower_epsilon(count: int, right: int, delta: float) -> float:
    """Return the largest ε that so many right guesses of so many coins rule out, at `CONFIDENCE`.

    Under (ε, δ) the number of right guesses is at most a binomial one with probability e^ε / (1 + e^ε), but for a term
    in δ (Theorem 5.2 of the paper).
    """
    low, high = 0.0, 50.0
    if count == 0 or _chance(count, right, 0.0, delta) > 1 - CONFIDENCE:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(count, right, middle, delta) <= 1 - CONFIDENCE else (low, middle)
    return low


def _chance(count: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least so many right guesses under (ε, δ)."""
    from scipy.stats import binom

    rate = 1 / (1 + torch.tensor(-epsilon, dtype=torch.float64).exp().item())
    below = binom.pmf(range(right - 1, -1, -1), count, rate).cumsum()
    worst = max((float(total) / (place + 1) for place, total in enumerate(below)), default=0.0)
    return min(1.0, float(binom.sf(right - 1, count, rate)) + 2 * count * delta * worst)


# -- membership and memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Membership:
    """How well a threshold on the loss tells training rows from rows never seen.

    Args:
        auc: the probability that a training row's loss is the smaller one; 0.5 is guessing.
        found: the share of training rows below a threshold that `ALARMS` of the others are below.
        interval: a 95 % interval of `found` (Clopper and Pearson), for the threshold as it is.
        rows: numbers of training rows and of others.
    """

    auc: float
    found: float
    interval: tuple[float, float]
    rows: tuple[int, int]


def membership(trained: Sequence[float], others: Sequence[float]) -> Membership:
    """Measure membership inference by loss."""
    inside, outside = torch.tensor(trained, dtype=torch.float64), torch.tensor(others, dtype=torch.float64)
    pairs = outside[None] - inside[:, None]
    auc = float(((pairs > 0).double() + (pairs == 0).double() / 2).mean())
    hits = int((inside < torch.quantile(outside, ALARMS)).sum())
    interval = exact_interval(hits, len(inside))
    return Membership(auc, hits / len(inside), interval, (len(inside), len(outside)))


def exact_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    low = 0.0 if hits == 0 else float(beta.ppf(0.025, hits, count - hits + 1))
    return low, 1.0 if hits == count else float(beta.ppf(0.975, hits + 1, count - hits))


def verbatim(context: PredictionContext, state: State, rows: TokenizedRows, count: int) -> int:
    """Count the rows among the first `count` whose prompt the model answers word for word as the row does."""
    first = rows.first(count)
    written = answers(context, state, first)
    return sum(bool(own) and own == answer for own, answer in zip(written, first.answers or [], strict=True))
