"""A silo reports each term of the loss as the mean over the steps that have it."""

from __future__ import annotations

from collections import defaultdict

import pytest

from silotune.training.silo_round import LocalRound
from tests.support.method_cases import every_method
from tests.support.tiny import ONE_TASK


@every_method
def test_a_term_is_the_mean_over_the_steps_that_have_it(method, tiny_federation, monkeypatch):
    words = ["partition.silos=1", "data.tasks=[beta]"] if method in ONE_TASK else []
    federation = tiny_federation(method, "train.steps=2", *words)
    seen: dict[str, list[float]] = defaultdict(list)
    count = LocalRound.count

    def noted(local, batch, terms, *more):
        for term, value in terms.items():
            seen[term].append(value)
        count(local, batch, terms, *more)

    monkeypatch.setattr(LocalRound, "count", noted)
    silo, participant = next(iter(federation.silos.values())), federation.client()
    for number in (1, 2):  # in a silo's first round FedFAME trains nothing
        seen.clear()
        metrics = participant.rounds([silo], federation.coordinator.broadcast(number))[0].metrics
        logged = {term: value for term, value in metrics.items() if term in seen}
        assert logged == pytest.approx({term: sum(values) / len(values) for term, values in seen.items()})
    assert "loss" in seen
    if method == "ditto":
        assert len(seen["distance"]) < len(seen["loss"])
