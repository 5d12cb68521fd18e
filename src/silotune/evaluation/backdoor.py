"""Add an attack's success rate (ASR) and clean accuracy to silos' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from silotune.core.tensors import State
from silotune.data.scores import accuracy
from silotune.evaluation.federation_scores import evaluate_silos, mean_score
from silotune.evaluation.predict import logits
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.silo import EvaluationRows


def success_rate(predicted: Tensor, labels: Tensor, target: int) -> float | None:
    """Return the share of rows of other classes that are predicted as the target class, in percent.

    Args:
        predicted: classes predicted for rows with the trigger, shape (rows,).
        labels: their true classes, shape (rows,).
        target: the class that the attack aims at.

    Returns:
        The attack success rate; None if every row is of the target class.
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
    others.

    Returns:
        The entry; None if no silo was measured.
    """
    measured = {name: silo for name, silo in silos.items() if "asr" in silo}
    if not measured:
        return None
    honest = {name: silo for name, silo in measured.items() if name not in malicious}
    return _means(measured) | {"malicious": list(malicious), "honest": _means(honest)}


def _attacked(context: TrainingContext, state: State, evaluation: EvaluationRows) -> dict[str, float | None]:
    """Return the attack's success rate, and the accuracy if the metric is another; empty without a target."""
    if evaluation.attack is None:
        return {}
    rows, test, entry = evaluation.attack.rows, evaluation.test, {}
    if test.task.metric != "accuracy":
        entry["accuracy"] = accuracy(logits(context, state, test).argmax(-1), test.labels) if len(test) else None
    predicted = logits(context, state, rows).argmax(-1) if len(rows) else rows.labels
    return entry | {"asr": success_rate(predicted, rows.labels, evaluation.attack.target)}


def _means(silos: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    return {key: mean_score({name: silo[key] for name, silo in silos.items()}) for key in ("accuracy", "asr")}
