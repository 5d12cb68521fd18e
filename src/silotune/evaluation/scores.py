"""Scores of a federation's models: per silo, per split, at its present state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from silotune.core.numeric import mean_ignoring_none
from silotune.core.tensors import State
from silotune.evaluation.instance_vectors import personalized_state
from silotune.evaluation.predict import Measured, measure
from silotune.methods.parts import Scope, names_with
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.silo import Evaluation, Silo

Judgment = TypeVar("Judgment")


def state_of(federation: Federation, silo: Silo) -> State:
    """Return the silo's whole model with the coordinator's present shared parts; see `personalized_state`."""
    return personalized_state(federation.context, silo, federation.coordinator.shared)


def scores(federation: Federation, split: Literal["validation", "test"]) -> dict[str, float | None]:
    """Return per reported silo the score of its model (percent; None without rows)."""
    return {name: silo.score for name, silo in measured(federation, split).items()}


def measured(federation: Federation, split: Literal["validation", "test"]) -> dict[str, Measured]:
    """Return per reported silo the scores of its model."""
    return judged(federation, lambda state, rows: measure(federation.context, state, getattr(rows, split)))


def judged(federation: Federation, judge: Callable[[State, Evaluation], Judgment]) -> dict[str, Judgment]:
    """Judge per reported silo its model on its rows.

    If one data set is partitioned, all silos are judged on the same central rows. Predictions with shared parts alone
    are then those of one model, and made once; with private parts, every silo's model is judged.

    Args:
        federation: at its present state.
        judge: (all parts of a model, rows to judge it on) → judgment.
    """
    alike = one_model(federation.context)
    made: dict[tuple[str, int], Judgment] = {}
    judgments = {}
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            key = ("" if alike else silo.name, id(evaluation))
            if key not in made:
                made[key] = judge(state_of(federation, silo), evaluation)
            judgments[name] = made[key]
    return judgments


def one_model(context: TrainingContext) -> bool:
    """Return whether all silos' predictions are made with shared parts alone."""
    prediction = context.method.prediction()
    shared = names_with(context.parts, Scope.SHARED)
    learned = any(callable(weight) for weight in prediction.mix.values())  # from a silo's own state
    head = context.parts[prediction.head].module
    heads = {prediction.head} if getattr(head, "has_tensors", True) else set()
    return not learned and {*prediction.mix, *heads} <= {*shared}


def mean(scores: Mapping[str, float | None]) -> float | None:
    """Return the mean over silos, in any order; None without rows.

    The mean of equal scores is that score, to the bit, as of one model for all silos.
    """
    values = [value for value in scores.values() if value is not None]
    return values[0] if len(set(values)) == 1 else mean_ignoring_none(values)


def results(federation: Federation, test: Mapping[str, float | None] | None = None) -> dict[str, dict[str, Any]]:
    """Return per reported silo: metric, validation and test score at the federation's present state, and row counts.

    `accuracy` is added beside another metric if a task's answers are options.

    Args:
        federation: at its present state.
        test: the test scores, if they are known already.
    """
    entries: dict[str, dict[str, Any]] = {}
    validation = scores(federation, "validation")
    tested: dict[str, Measured] = {}
    if test is None:
        tested = measured(federation, "test")
        test = {name: silo.score for name, silo in tested.items()}
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            task = evaluation.test.task
            entries[name] = {
                "metric": task.metric,
                "validation": validation[name],
                "test": test[name],
                "rows": {
                    "train": silo.train[task.name].clean_count,
                    "validation": len(evaluation.validation),
                    "test": len(evaluation.test),
                },
            }
            if name in tested and tested[name].accuracy is not None:
                entries[name]["accuracy"] = tested[name].accuracy
    return entries
