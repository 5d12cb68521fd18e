"""The model of a silo that has nothing to be judged on is not made: the parts of silos never sampled are not drawn."""

from __future__ import annotations

from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.federation_scores import measure_silos
from silotune.runs.summary import parameters
from silotune.training.initial_parts import InitialParts
from silotune.training.silo import EvaluationRows


def test_parts_are_drawn_only_for_silos_that_are_judged(tiny_federation, monkeypatch):
    federation = tiny_federation("fedmcp")
    drawn = []
    draw = InitialParts.private
    monkeypatch.setattr(
        InitialParts, "private", lambda self, silo, tasks: drawn.append(silo) or draw(self, silo, tasks)
    )
    names = list(federation.silos)
    measure_silos(federation, "validation")
    assert drawn == names
    drawn.clear()
    silo = federation.silos[names[0]]
    rows = silo.evaluations[names[0]].validation
    none = TokenizedRows(rows.task, [], None, rows.labels[:0])
    silo.evaluations = {names[0]: EvaluationRows(none, none)}
    scores = measure_silos(federation, "validation")
    assert drawn == names[1:]
    assert scores[names[0]].score is None


def test_parameters_are_counted_on_one_silo_of_each_kind(tiny_federation, monkeypatch):
    federation = tiny_federation("fedmcp")
    before = parameters(federation)
    first = next(iter(federation.silos.values()))
    copies = {f"copy-{number}": type(first)(f"copy-{number}", first.train, {}) for number in range(3)}
    federation.silos.update(copies)
    drawn = []
    draw = InitialParts.private
    monkeypatch.setattr(
        InitialParts, "private", lambda self, silo, tasks: drawn.append(silo) or draw(self, silo, tasks)
    )
    assert parameters(federation) == before
    assert len(drawn) == len(federation.silos) - len(copies)
