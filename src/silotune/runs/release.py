"""Measure how much a silo's finished model reveals about its training rows (`silotune release`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from silotune.communication.privacy.accountant import DELTA, assuming
from silotune.communication.privacy.row_accountant import row_epsilon
from silotune.core.files import write_text
from silotune.core.tensors import State
from silotune.data.batching import make_batch
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError, require_known
from silotune.evaluation.predict import Predictor, answers
from silotune.runs.build.builder import build
from silotune.runs.build.plan_row_noise import covers_models
from silotune.runs.build.resolve import read_config
from silotune.runs.model_file import model_folder
from silotune.runs.personal_model import PersonalModel
from silotune.training.federation import Federation
from silotune.training.prediction import PredictionContext
from silotune.training.silo import Silo

CONFIDENCE = 0.95

ALARMS = 0.1
"""The share of rows never seen that an attacker may take for training rows."""


def row_losses(context: PredictionContext, state: State, rows: TokenizedRows, count: int | None = None) -> list[float]:
    """Return the loss of each row on its own, or of the first `count` rows, under a model."""
    predictor = Predictor.of(context, state, rows)
    batches = (
        make_batch(rows, rows.sequences([row]), context.backbone.pad_id) for row in range(count or rows.examples)
    )
    return [float(predictor.loss(batch)) for batch in batches]


# -- canaries ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Audit:
    """How often an audit guessed right whether canaries were present (Steinke, Nasr and Jagielski 2023).

    `lower` is a lower bound of ε, with probability `CONFIDENCE`; `most` is the bound if all guesses were right.
    """

    canaries: int
    right: int
    lower: float
    most: float


def audit(losses: Sequence[float], present: Sequence[bool], delta: float) -> Audit:
    """Guess that the half of the canaries with the smaller loss was trained on, and bound ε by the right guesses.

    `losses` are those under the finished model; `present` tells for each canary whether it was trained on.
    """
    count = len(losses)
    smaller = torch.tensor(losses).argsort(stable=True)[: count // 2].tolist()
    guesses = [row in {*smaller} for row in range(count)]
    right = sum(guess == coin for guess, coin in zip(guesses, present, strict=True))
    return Audit(count, right, lower_epsilon(count, right, delta), lower_epsilon(count, count, delta))


def lower_epsilon(count: int, right: int, delta: float) -> float:
    """Return the largest ε that `right` guesses out of `count` rule out, at `CONFIDENCE`.

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
    """How well a threshold on the loss tells training rows from other rows.

    `auc` is the probability that a training row has the smaller loss. A threshold is set so that `ALARMS` of the other
    rows are below it: `found` is the share of training rows below, with its 95 % interval. `rows` counts both kinds.
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


RELEASE_FILE = "release.json"

MOST_ROWS = 500
"""Training rows, and test rows, whose losses are compared."""

MOST_ANSWERS = 100


@dataclass(frozen=True)
class Release:
    """The measurements of a silo's model; `unit` is whom noise protects, None without noise on rows."""

    silo: str
    unit: str | None
    upper: float
    """ε of the model's tensors by the account of their noise; infinite if any was trained without."""
    delta: float
    canaries: Audit | None
    members: Membership
    repeated: tuple[int, int, int, int] | None
    """Training answers repeated word for word, of how many; the same two for test answers; None without answers."""
    colluders: int | None = None
    """Of the other silos, on which ε depends where all share one noise; else None."""

    @classmethod
    def read(cls, path: Path) -> Release:
        """Read a file written by `write`."""
        tree = json.loads(path.read_text(encoding="utf-8"))
        upper = math.inf if tree["upper"] is None else tree["upper"]
        return TypeAdapter(cls).validate_python(tree | {"upper": upper})

    def fields(self) -> dict[str, Any]:
        """Return the numbers as JSON has them: null for an ε without a bound."""
        return asdict(self) | {"upper": None if math.isinf(self.upper) else self.upper}

    def write(self, folder: Path) -> None:
        """Write the numbers into a run's folder at a silo."""
        write_text(folder / RELEASE_FILE, json.dumps(self.fields(), indent=1))

    def lines(self) -> Iterator[str]:
        """Yield the page's lines."""
        upper = "∞: some of its tensors were trained without noise on rows" if math.isinf(self.upper) else None
        bound = upper or f"{self.upper:.3g} at δ = {self.delta:g} for each {self.unit}"
        yield f"model of silo {self.silo!r}"
        yield f"ε by the account of its noise: {bound}{assuming(self.colluders)}"
        if self.canaries is None:
            yield "ε at least: not measured, the run had no canaries (audit.canaries)"
        else:
            estimate = self.canaries
            yield (
                f"ε at least: {estimate.lower:.3g} (95 %), by {estimate.right} of {estimate.canaries} coins guessed; "
                f"all right would have shown {estimate.most:.3g}"
            )
        low, high = self.members.interval
        yield (
            f"membership by loss: AUC {self.members.auc:.2f} (0.5 is guessing); {self.members.found:.0%} of the "
            f"training rows found ({low:.0%} to {high:.0%}) at {ALARMS:.0%} false alarms; {self.members.rows[0]} "
            f"training and {self.members.rows[1]} other rows"
        )
        if self.repeated is not None:
            own, prompts, other, others = self.repeated
            yield f"word for word: {own} of {prompts} training answers, {other} of {others} test answers"
        yield self.sentence

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.canaries is not None and self.canaries.lower > self.upper:
            return "These measurements contradict the account: do not give the model away, and report the fault."
        if math.isinf(self.upper):
            return "Nothing bounds what this model tells about a training row; better attacks than these exist."
        return f"By its account the model tells of each {self.unit} at most what ε allows; no measure contradicts it."


def measure_release(run: Path, silo: str) -> Release:
    """Measure a silo's model after a run in one process; the rows must be where the run read them.

    After a run over machines, return what the silo's worker measured at its end (`release.json`).
    """
    if (file := run / RELEASE_FILE).is_file():
        return Release.read(file)
    folder = model_folder(run, silo)
    federation = build(read_config(str(run / "config.yaml")))
    require_known("silo", silo, federation.silos)
    model = PersonalModel.open(folder, federation.backbone)
    return measure(federation, federation.silos[silo], model.context, model.state)


def measure(
    federation: Federation,
    silo: Silo,
    context: PredictionContext,
    state: State,
    charged: Callable[[float], float] | None = None,
) -> Release:
    """Measure a silo's model on its training and test rows, and on its canaries if there are any.

    `charged` returns the ε at a δ of what the silo answered in the run, by its ledger; None: as the run was planned.
    """
    if context.head.couples_rows:
        raise InputError(
            f"release: no row has a loss of its own under head={context.head.name}; allowed: losses by row"
        )
    (rows,), (evaluation,) = silo.train.values(), silo.evaluations.values()
    guarantee, own = federation.privacy, rows.examples
    shares = None if federation.context.row_privacy is None else federation.context.row_privacy.shares
    delta = (0.0 if guarantee is None else guarantee.account.delta) or federation.config.privacy.delta or DELTA
    estimate = None
    if silo.canaries is not None:
        canaries, present = silo.canaries
        own -= sum(present)
        estimate = audit(row_losses(context, state, canaries), present, delta)
    sets = (rows, min(own, MOST_ROWS)), (evaluation.test, min(evaluation.test.examples, MOST_ROWS))
    repeated = None
    if not rows.task.labeled and not rows.pairs:
        first = [min(count, MOST_ANSWERS) for _, count in sets]
        hits = [verbatim(context, state, part, count) for (part, _), count in zip(sets, first, strict=True)]
        repeated = hits[0], first[0], hits[1], first[1]
    return Release(
        silo.name,
        federation.config.privacy.unit,
        upper_epsilon(federation, delta, charged),
        delta,
        estimate,
        membership(*(row_losses(context, state, part, count) for part, count in sets)),
        repeated,
        None if shares is None else shares.colluders,
    )


def upper_epsilon(federation: Federation, delta: float, charged: Callable[[float], float] | None = None) -> float:
    """Return the ε of a silo's model by the account of its noise; infinite if a phase on rows has none.

    Every phase counts, because the model's folder holds all parts, also those that the prediction does not mix.
    """
    noise = federation.context.row_privacy
    if noise is None or not covers_models(federation.context):
        return math.inf
    if charged is not None:
        return charged(delta)
    plans = noise.plans.values()  # of all silos, whose units the shared parts tell of
    return max(row_epsilon(each.multiplier, delta, each.rate, each.steps[-1]) for each in plans)
