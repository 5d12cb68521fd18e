"""Test-time personalization (FedDPA, section 3.1): every silo's model on every task; and tasks that no silo trained on.

*Personalisation* is a model's score on its silo's own task, *test-time personalization* its mean score over all tasks,
its own among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from silotune.core.numeric import mean_ignoring_none
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.predict import Measured, measure
from silotune.evaluation.scores import one_model, state_of
from silotune.training.federation import Federation


@dataclass(frozen=True)
class TestTime:
    """Reported silo → task → what its model scores there, and which of the tasks is the silo's own."""

    __test__ = False  # to pytest

    measured: Mapping[str, Mapping[str, Measured]]
    own: Mapping[str, str]

    @property
    def personalization(self) -> dict[str, float | None]:
        """Reported silo → score on its own task."""
        return {name: self.measured[name][task].score for name, task in self.own.items()}

    @property
    def test_time(self) -> dict[str, float | None]:
        """Reported silo → mean over all tasks."""
        return {name: mean_ignoring_none(one.score for one in row.values()) for name, row in self.measured.items()}

    def entry(self, name: str) -> dict[str, Any]:
        """What `summary.json` says of a silo; accuracies of the tasks whose answers are options, where there are such.

        `test_time_accuracy` is their mean over these tasks.
        """
        row = self.measured[name]
        accuracies = {task: one.accuracy for task, one in row.items() if one.accuracy is not None}
        own = {"accuracy": accuracies[self.own[name]]} if self.own[name] in accuracies else {}
        more = {"test_time_accuracy": mean_ignoring_none(accuracies.values()), "accuracy_on_tasks": accuracies}
        return {
            "personalization": self.personalization[name],
            "test_time": self.test_time[name],
            "on_tasks": {task: one.score for task, one in row.items()},
            **own,
            **(more if accuracies else {}),
        }


def test_time(federation: Federation) -> TestTime:
    """Every silo's model on every task's test rows, at the federation's present state.

    Silos that are judged on the same rows (parts of one task) count as one. One model for all silos is judged once.
    """
    sets, own = _test_sets(federation)
    rows = _on(federation, sets)
    return TestTime({name: rows[silo] for silo, names in _reported(federation).items() for name in names}, own)


def unseen(federation: Federation) -> dict[str, Any]:
    """The tasks left out of training: average and maximum over silos, and each silo's score (Table 14).

    Beside another metric the same of accuracy, where answers are options.
    """
    sets = {name: federation.absent[name].evaluations[name].test for name in federation.config.evaluation.unseen}
    rows = _on(federation, sets)
    found: dict[str, Any] = {}
    for name, test in sets.items():
        found[name] = {"metric": test.task.metric, **_over({silo: row[name].score for silo, row in rows.items()})}
        accuracies = {silo: row[name].accuracy for silo, row in rows.items()}
        if any(value is not None for value in accuracies.values()):
            found[name]["accuracy"] = _over(accuracies)
    return found


def _over(silos: Mapping[str, float | None]) -> dict[str, Any]:
    known = [value for value in silos.values() if value is not None]
    return {"average": mean_ignoring_none(known), "maximum": max(known, default=None), "silos": dict(silos)}


def _on(federation: Federation, sets: Mapping[str, TokenizedRows]) -> dict[str, dict[str, Measured]]:
    """Training silo → set → what the silo's model scores there."""
    found: dict[str, dict[str, Measured]] = {}
    alike = one_model(federation.context)
    for silo in federation.silos.values():
        if alike and found:
            found[silo.name] = next(iter(found.values()))
            continue
        state = state_of(federation, silo)
        found[silo.name] = {name: measure(federation.context, state, rows) for name, rows in sets.items()}
    return found


def _reported(federation: Federation) -> dict[str, list[str]]:
    """Training silo → the names under which it is reported."""
    return {silo.name: list(silo.evaluations) for silo in federation.silos.values()}


def _test_sets(federation: Federation) -> tuple[dict[str, TokenizedRows], dict[str, str]]:
    """Task → its test rows, and reported silo → its task. Sets of one task go by their silos' names.

    So do all sets, where such a name is a task's, too.
    """
    by_rows: dict[int, list[str]] = {}
    rows: dict[int, TokenizedRows] = {}
    for silo in federation.silos.values():
        for name, evaluation in silo.evaluations.items():
            by_rows.setdefault(id(evaluation), []).append(name)
            rows[id(evaluation)] = evaluation.test
    tasks = [found.task.name for found in rows.values()]
    labels = {
        key: names[0] if tasks.count(rows[key].task.name) > 1 else rows[key].task.name for key, names in by_rows.items()
    }
    if len({*labels.values()}) < len(labels):  # one is called as the task of another
        labels = {key: names[0] for key, names in by_rows.items()}
    own = {name: labels[key] for key, names in by_rows.items() for name in names}
    return {labels[key]: found for key, found in rows.items()}, own
