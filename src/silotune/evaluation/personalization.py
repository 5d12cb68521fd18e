"""Score every silo's model on every task, and on tasks left out of training; and silos that join late (FedDPA).

*Personalization* is a model's score on its silo's own task, *test-time personalization* its mean score over all tasks,
its own among them (FedDPA, section 3.1). A silo may be reported under several names; see `federation_scores`.

A *new* silo is scored by the most similar silo's model, trained from it, and trained alone. The similarity of two silos
is the mean similarity of the new silo's rows to sampled rows of the existing silo, as for a text's weight. This reads
the vectors of the existing silo's rows and copies its local part. Both are private otherwise, so a federation with new
silos has to agree to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from silotune.core.numeric import mean_ignoring_none
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.federation_scores import all_share_one_model, current_model_state
from silotune.evaluation.instance_vectors import keeping_vectors, personalized_state, weigh
from silotune.evaluation.predict import Measured, measure, score, weighed
from silotune.training.federation import Federation
from silotune.training.silo import Silo, SiloState

OnTasks = Mapping[str, Mapping[str, Measured]]
"""Silo → task → the scores of the silo's model on the task's test rows."""


@dataclass(frozen=True)
class TestTime:
    """Scores of every reported silo's model on every task, and every silo's own task."""

    __test__ = False  # the name begins like a test's; pytest must not collect it

    measured: OnTasks
    own: Mapping[str, str]

    @property
    def on_own_task(self) -> dict[str, Measured]:
        """Reported silo → its scores on its own task."""
        return {name: self.measured[name][task] for name, task in self.own.items()}

    @property
    def personalization(self) -> dict[str, float | None]:
        """Reported silo → score on its own task."""
        return {name: own.score for name, own in self.on_own_task.items()}

    @property
    def test_time(self) -> dict[str, float | None]:
        """Reported silo → mean over all tasks."""
        return {
            name: mean_ignoring_none(scores.score for scores in row.values()) for name, row in self.measured.items()
        }

    def entry(self, name: str) -> dict[str, Any]:
        """Return a silo's entry in `summary.json`, with accuracies of the tasks whose answers are options.

        `test_time_accuracy` is the mean of these accuracies.
        """
        row = self.measured[name]
        accuracies = {task: scores.accuracy for task, scores in row.items() if scores.accuracy is not None}
        own_accuracy = {"accuracy": accuracies[self.own[name]]} if self.own[name] in accuracies else {}
        more = {"test_time_accuracy": mean_ignoring_none(accuracies.values()), "accuracy_on_tasks": accuracies}
        return {
            "personalization": self.personalization[name],
            "test_time": self.test_time[name],
            "on_tasks": {task: scores.score for task, scores in row.items()},
            **own_accuracy,
            **(more if accuracies else {}),
        }


def score_test_time(federation: Federation, measured: OnTasks | None = None) -> TestTime:
    """Score every silo's model on every task's test rows, at the federation's present state.

    Silos with the same test rows (parts of one task) add one task. A model that all silos share is scored once.
    `measured` is what other processes measured (`measure_on_every_task`).
    """
    label_of = _test_sets(federation)[1]
    measured = measured or measure_on_every_task(federation)
    reported = {
        name: {
            **measured[silo.name],
            label_of[name]: weighed(measured[silo.name][label_of[name]], evaluation.test),
        }
        for silo in federation.silos.values()
        for name, evaluation in silo.evaluations.items()
    }
    return TestTime(reported, label_of)


def measure_on_every_task(federation: Federation, silos: Mapping[str, Silo] | None = None) -> OnTasks:
    """Return training silo → task → the scores of the silo's model; of these silos, by default of all."""
    some = federation if silos is None else replace(federation, silos=silos)
    return _measure_on_sets(some, _test_sets(federation)[0])


def unseen(federation: Federation) -> dict[str, Any]:
    """Score every silo's model on the tasks left out of training (FedDPA, Table 14).

    A task has its metric, the average and maximum over silos, and each silo's score; `accuracy` has the same of the
    accuracies, beside another metric, if answers are options.
    """
    sets = {name: federation.absent[name].evaluations[name].test for name in federation.config.evaluation.unseen}
    measured = _measure_on_sets(federation, sets)
    entries: dict[str, Any] = {}
    for name, test in sets.items():
        entries[name] = {
            "metric": test.task.metric,
            **_aggregate({silo: row[name].score for silo, row in measured.items()}),
        }
        accuracies = {silo: row[name].accuracy for silo, row in measured.items()}
        if any(value is not None for value in accuracies.values()):
            entries[name]["accuracy"] = _aggregate(accuracies)
    return entries


def _aggregate(silos: Mapping[str, float | None]) -> dict[str, Any]:
    """Return average, maximum and the silos' scores themselves."""
    values = [value for value in silos.values() if value is not None]
    return {"average": mean_ignoring_none(values), "maximum": max(values, default=None), "silos": dict(silos)}


def _measure_on_sets(federation: Federation, sets: Mapping[str, TokenizedRows]) -> dict[str, dict[str, Measured]]:
    """Return training silo → set of rows → the scores of the silo's model."""
    measured: dict[str, dict[str, Measured]] = {}
    same_model = all_share_one_model(federation)
    with keeping_vectors(federation.context):
        for silo in federation.silos.values():
            if same_model and measured:
                measured[silo.name] = next(iter(measured.values()))
                continue
            state = current_model_state(federation, silo)
            measured[silo.name] = {name: measure(federation.context, state, rows) for name, rows in sets.items()}
    return measured


def _test_sets(federation: Federation) -> tuple[dict[str, TokenizedRows], dict[str, str]]:
    """Return label → test rows, and reported silo → the label of its rows.

    A label is the task's name; if one task has several sets of rows, the label is the first silo evaluated on the set.
    All labels are silos' names if one of those is also a task's name.
    """
    by_rows: dict[tuple[int, int], list[str]] = {}
    rows: dict[tuple[int, int], TokenizedRows] = {}
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            by_rows.setdefault(evaluation.key, []).append(name)
            rows[evaluation.key] = evaluation.test
    tasks = [test.task.name for test in rows.values()]
    labels = {
        key: names[0] if tasks.count(rows[key].task.name) > 1 else rows[key].task.name for key, names in by_rows.items()
    }
    if len({*labels.values()}) < len(labels):
        labels = {key: names[0] for key, names in by_rows.items()}
    label_of = {name: labels[key] for key, names in by_rows.items() for name in names}
    return {labels[key]: test for key, test in rows.items()}, label_of


def _similarities(federation: Federation, new: Silo) -> dict[str, float]:
    """Return silo → mean similarity of the new silo's training rows to its rows, for all silos that trained."""
    similarities = {}
    for silo in federation.silos.values():
        if silo.state is None:
            continue
        state = current_model_state(federation, silo)
        weights = [weigh(federation.context, state, rows) for rows in new.train.values()]
        values = [float(weight.similarities.double().mean()) for weight in weights if weight is not None]
        similarities[silo.name] = sum(values) / len(values)
    return similarities


def join(federation: Federation, new: Silo) -> dict[str, Any]:
    """Return a new silo's entry in `summary.json`: the most similar silo, and three test scores.

    `found` is the score of the similar silo's model, `test` the score after local training from that model, and `alone`
    the score after local training from the initial parts.
    """
    context = federation.context
    similarities = _similarities(federation, new)
    nearest = max(sorted(similarities), key=similarities.__getitem__)
    test = new.evaluations[new.name].test
    existing = federation.silos[nearest]
    assert existing.state is not None, "silos that never trained are not compared"

    def after_training(start: SiloState | None) -> float | None:
        joined = Silo(new.name, new.train, {}, start)
        shared = federation.coordinator.shared_of(new.name if start is None else nearest)
        joined.state = SiloState(
            federation.trainer.adapt(joined, shared, federation.config.rounds, from_start=start is None)
        )
        return score(context, personalized_state(context, joined, shared), test)

    return {
        "metric": test.task.metric,
        "most_similar": nearest,
        "similarities": similarities,
        "found": score(context, current_model_state(federation, existing), test),
        "test": after_training(existing.state),
        "alone": after_training(None),
    }
