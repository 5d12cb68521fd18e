"""Score all silos' current models on a split, and write the silos' part of `summary.json`.

The engines and the worker of a silo call it. A *reported silo* is a name under which the summary has scores: a training
silo, or, where one training silo holds the rows of several (`centralised`), each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from silotune.core.numeric import mean_ignoring_none
from silotune.core.tensors import State
from silotune.data.scores import accuracy
from silotune.data.tasks import LOSS, LOSS_METRICS
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.instance_vectors import personalized_state
from silotune.evaluation.joint import in_one_forward, joint_logits
from silotune.evaluation.predict import Measured, logits, measure, weighed
from silotune.methods.parts import Scope, names_with
from silotune.methods.step import heads_of
from silotune.models.forward.mixing import parts_in
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.silo import EvaluationRows, Silo

Result = TypeVar("Result")

Model = Callable[[], State]

_Key = tuple[str, tuple[int, int]]
"""The silo whose model it is ("" if all silos have one model), and the identity of the rows that score it."""


def current_model_state(federation: Federation, silo: Silo) -> State:
    """Return all parts of a silo's model, with the coordinator's current shared parts; see `personalized_state`."""
    return personalized_state(federation.context, silo, federation.coordinator.shared_of(silo.name))


Split = Literal["validation", "test"]


def score_silos(federation: Federation, split: Split) -> dict[str, float | None]:
    """Return reported silo → its model's score (see `measure_silos`); None if it has no rows."""
    return {name: silo.score for name, silo in measure_silos(federation, split).items()}


def measure_silos(federation: Federation, split: Split) -> dict[str, Measured]:
    """Return reported silo → its model's score, predictions and, beside another metric, accuracy.

    Validation rows are judged by the loss if the configuration says so. For test rows with answers the loss is measured
    as well. Where silos train in cohorts, they are scored in joint forwards, too (`scored_together`).
    """
    metric = _metric(federation, split)
    context, models, key_of = federation.context, *_models(federation)

    def rows_of(key: _Key) -> TokenizedRows:
        rows: TokenizedRows = getattr(models[key][1], split)
        return rows

    logits_by_key: dict[_Key, Tensor | None] = {}
    if federation.cohort.size > 1:
        labeled = [key for key in models if _by_logits(rows_of(key), metric)]
        outputs = joint_logits(context, ((models[key][0](), rows_of(key)) for key in labeled))
        logits_by_key = dict(zip(labeled, outputs, strict=True))

    def measured(key: _Key) -> Measured:
        (model, _), rows, logits_of_rows = models[key], rows_of(key), logits_by_key.get(key)
        state = model() if len(rows) and logits_of_rows is None else {}
        return measure(context, state, rows, metric, split == "test", logits_of_rows)

    scores = {key: measured(key) for key in models}
    return weighed_by_silo(federation, split, {name: scores[key] for name, key in key_of.items()})


def weighed_by_silo(federation: Federation, split: Split, measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """Judge models that read the same rows by each reported silo's own weights of these (`weighed`)."""
    metric = _metric(federation, split)
    evaluations = {name: rows for silo in federation.silos.values() for name, rows in silo.evaluations.items()}
    return {name: weighed(each, getattr(evaluations[name], split), metric) for name, each in measured.items()}


def scored_together(federation: Federation, split: Split) -> list[list[str]]:
    """Return the training silos in groups, each of which `measure_silos` scores to the same bits without the others.

    Groups of silos that train alone have one silo. Silos that train in cohorts share a forward up to `rows_scored`.
    """
    metric, counts = _metric(federation, split), dict.fromkeys(federation.silos, 0)
    for silo in federation.silos.values() if federation.cohort.size > 1 else ():
        every = [getattr(evaluation, split) for evaluation in silo.evaluations.values()]
        counts[silo.name] = sum(rows.sequence_count for rows in every if _by_logits(rows, metric))
    joint = in_one_forward(filter(counts.get, counts), counts.__getitem__, federation.context.rows_scored)
    return [*([name] for name, count in counts.items() if not count), *joint]


def _metric(federation: Federation, split: Split) -> str | None:
    """Return the metric of a split; None: each task's own."""
    return LOSS if split == "validation" and federation.config.validates_by_loss else None


def _by_logits(rows: TokenizedRows, metric: str | None) -> bool:
    return len(rows) > 0 and rows.task.labeled and (metric or rows.task.metric) not in LOSS_METRICS


def evaluate_silos(federation: Federation, evaluate: Callable[[Model, EvaluationRows], Result]) -> dict[str, Result]:
    """Call `evaluate` with the current model and the evaluation rows of every reported silo; returns silo → result.

    Without rows `evaluate` should not ask for the model: the parts of a silo that was never sampled would be drawn.
    """
    models, key_of = _models(federation)
    computed = {key: evaluate(model, evaluation) for key, (model, evaluation) in models.items()}
    return {name: computed[key] for name, key in key_of.items()}


def _models(federation: Federation) -> tuple[dict[_Key, tuple[Model, EvaluationRows]], dict[str, _Key]]:
    """Return the models to score, each with its rows, and reported silo → its model's key.

    If one data set is partitioned, all silos read the same rows, whatever each of these counts. If they also have the
    same model, because only shared parts predict, it reads them once.
    """
    same_model = all_share_one_model(federation)
    models: dict[_Key, tuple[Model, EvaluationRows]] = {}
    key_of = {}
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            key_of[name] = ("" if same_model else silo.name, evaluation.key)
            models.setdefault(key_of[name], (partial(current_model_state, federation, silo), evaluation))
    return models, key_of


def all_share_one_model(federation: Federation) -> bool:
    """Return whether all silos predict with the same model: no part or weight of a prediction is private.

    Nor do silos receive shared parts of their own, as of a rank or of the group that they chose.
    """
    context, broadcasts = federation.context, federation.coordinator.broadcasts
    if context.initial.ranks or any(broadcasts.key(name) is not None for name in federation.silos):
        return False
    prediction = context.prediction
    private = {*names_with(context.parts, Scope.PRIVATE)}
    # a callable weight is computed from the silo's own state
    mixes = [prediction.mix] if isinstance(prediction.head, str) else [prediction.mix, prediction.head]
    has_private_weight = any(callable(weight) for mix in mixes for weight in mix.values())
    heads = [name for name in heads_of(prediction.head) if getattr(context.parts[name].module, "has_tensors", True)]
    return not has_private_weight and private.isdisjoint((*parts_in(prediction.mix), *heads))


def mean_score(scores: Mapping[str, float | None]) -> float | None:
    """Return the mean of the silos' scores, whatever their order; None if no silo has a score.

    If all scores are equal, as with one model on the same rows, the mean is exactly that score, without rounding.
    """
    values = [value for value in scores.values() if value is not None]
    return values[0] if len(set(values)) == 1 else mean_ignoring_none(values)


def summary_entries(
    federation: Federation, test: Mapping[str, Measured], validation: Mapping[str, float | None]
) -> dict[str, dict[str, Any]]:
    """Return reported silo → its entry in `summary.json`: metric, validation and test score, and row counts.

    `accuracy` is added beside another metric if a task's answers are options.
    """
    entries: dict[str, dict[str, Any]] = {}
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            task = evaluation.test.task
            entries[name] = {
                "metric": task.metric,
                "validation": validation[name],
                "test": test[name].score,
                "rows": {
                    "train": silo.train[task.name].clean_count,  # without the copies that a backdoor attack adds
                    "validation": evaluation.validation.examples,
                    "test": evaluation.test.examples,
                },
            }
            if federation.config.validates_by_loss and task.metric != LOSS:
                entries[name]["validation_metric"] = LOSS
            if test[name].accuracy is not None:
                entries[name]["accuracy"] = test[name].accuracy
            if evaluation.own is not None:
                for key, shares in (("test_own", evaluation.own), ("test_shared", torch.ones_like(evaluation.own))):
                    entries[name][key] = weighed(test[name], replace(evaluation.test, shares=shares)).score
    return entries


def success_rate(predicted: Tensor, labels: Tensor, target: int) -> float | None:
    """Return the share of rows of other classes that are predicted as the target class, in percent; None without any.

    `predicted` and true `labels` have the shape (rows,).
    """
    others = labels != target
    return 100.0 * float((predicted[others] == target).double().mean()) if bool(others.any()) else None


def with_attack(federation: Federation, silos: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add `accuracy` and `asr` to the silos' entries, if the configuration has a backdoor attack."""
    if not any(rows.attack for silo in federation.silos.values() for rows in silo.evaluations.values()):
        return dict(silos)
    attacked = evaluate_silos(federation, lambda model, rows: _attacked(federation.context, model(), rows))
    return {
        # the test score is the accuracy where that is the metric, and is not computed again
        name: silo
        | ({"accuracy": silo["test"]} if silo["metric"] == "accuracy" and attacked[name] else {})
        | attacked[name]
        for name, silo in silos.items()
    }


def overall(silos: Mapping[str, Mapping[str, Any]], malicious: Sequence[str]) -> dict[str, Any] | None:
    """Return `attack` of `summary.json`: means over the measured silos, and over the honest ones among them.

    With private parts, a malicious silo's own model learns the backdoor directly; `honest` measures its effect on
    others. None if no silo was measured.
    """
    measured = {name: silo for name, silo in silos.items() if "asr" in silo}
    if not measured:
        return None
    honest = {name: silo for name, silo in measured.items() if name not in malicious}
    return _means(measured) | {"malicious": list(malicious), "honest": _means(honest)}


def _attacked(context: TrainingContext, state: State, evaluation: EvaluationRows) -> dict[str, float | None]:
    if evaluation.attack is None:
        return {}
    rows, test, target, entry = evaluation.attack.rows, evaluation.test, evaluation.attack.target, {}
    clean, predicted = (logits(context, state, each).argmax(-1) if len(each) else each.labels for each in (test, rows))
    if test.task.metric != "accuracy":
        entry["accuracy"] = accuracy(clean, test.labels) if len(test) else None
    success, without = success_rate(predicted, rows.labels, target), success_rate(clean, test.labels, target)
    return entry | {"asr": success, "asr_net": None if success is None or without is None else success - without}


def _means(silos: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    keys = ("accuracy", "asr", "asr_net")
    return {key: mean_score({name: silo[key] for name, silo in silos.items()}) for key in keys}
