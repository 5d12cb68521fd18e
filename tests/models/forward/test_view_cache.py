"""Constant views are computed in a phase's first pass over the rows alone, and nothing else changes by that."""

from __future__ import annotations

import pytest
import torch

from silotune.core.tensors import flatten
from silotune.data.batching import make_batch
from silotune.models.forward.mixing import constant_views
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import ConstantViews
from silotune.training import context as training_module
from silotune.training.local_trainer import LocalTrainer
from tests.support.numeric_rig import doubled, parts_in_double
from tests.support.tiny import METHODS, ONE_TASK

EPOCHS = 3
WITH = ["fedmcp", "moon", "fedfame"]
"""Methods with anchors whose phases follow `train.epochs`."""


def one_silo(method):
    return ["partition.silos=1", "data.tasks=[beta]"] if method in ONE_TASK else []


@pytest.fixture
def rounds(tiny_federation, monkeypatch):
    """`rounds(method, …)` → a silo's results of two rounds in float64, the second one with previous parts."""
    parts_in_double(monkeypatch)

    def run(method, *words, silos=1):
        words = [*one_silo(method), f"train.epochs={EPOCHS}", "data.train_rows=20", *words]
        federation = doubled(tiny_federation(method, *words))
        training = federation.context
        chosen = list(federation.silos.values())[:silos]
        shared = training.initial.shared(chosen)
        outcomes = []
        for number in (1, 2):
            results = LocalTrainer(training).rounds(chosen, shared, number)
            for silo, result in zip(chosen, results, strict=True):
                kept = {name: result.state[name] for name in training.parts if name not in shared}
                silo.state = type(training.state_of(silo))(kept, result.memory)
            shared = {name: {key: 0.9 * tensor for key, tensor in results[0].state[name].items()} for name in shared}
            outcomes += [(result.metrics.get("loss", 0.0), flatten(result.state)) for result in results]
        return outcomes

    return run


def test_without_constant_views_nothing_is_kept(tiny_federation):
    """So that the two computations that the next test compares would be the same one."""
    backbone = tiny_federation("fedavg-full").backbone
    for method in {*METHODS} - {*WITH}:
        words = (*one_silo(method), f"train.epochs={EPOCHS}")
        context = tiny_federation(method, *words, backbone=backbone).context
        assert not any(map(context.constant_views, context.phases)), method


@pytest.mark.parametrize(("method", "silos"), [("fedmcp", 1), ("fedmcp", 3), ("moon", 3), ("fedfame", 1)])
def test_kept_is_computed_again(method, silos, rounds, monkeypatch):
    """SGD, which does not make steps of rounding; three silos train in a cohort."""
    words = ["train.optimizer=sgd", "train.lr=0.1"]
    outcomes = rounds(method, *words, silos=silos)
    monkeypatch.setattr(training_module, "constant_views", lambda *_: frozenset())
    for (loss, state), (other_loss, other) in zip(outcomes, rounds(method, *words, silos=silos), strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-9)
        assert state.keys() == other.keys()
        for name, tensor in other.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("method", WITH)
def test_the_later_passes_run_trained_views_alone(method, rounds, monkeypatch):
    """Rows that go through without gradient: each once for every anchor of a phase, not in every epoch."""
    asked, run = [], ViewProgram.run

    def noted(program, batches, *more):
        rows = []
        handle = program.backbone.module("encoder.layer.1.output.dense").register_forward_hook(
            lambda module, inputs, output: None if output.requires_grad else rows.append(len(output))
        )
        views = run(program, batches, *more)
        handle.remove()
        asked.append((sum(rows), len(batches[0])))
        return views

    monkeypatch.setattr(ViewProgram, "run", noted)
    rounds(method)
    steps = len(asked) // (2 * EPOCHS) if method != "fedfame" else len(asked) // EPOCHS  # it skips the first round
    assert steps
    first, later = asked[-EPOCHS * steps :][:steps], asked[-(EPOCHS - 1) * steps :]
    anchors = {"fedmcp": 1, "moon": 2, "fedfame": 2}[method]
    if method == "fedfame":  # in the first step the received model is the silo's own
        assert first[0][0] == first[0][1]
        first = first[1:]
    assert all(rows == anchors * batch for rows, batch in first)
    assert all(rows == 0 for rows, _ in later)


def test_what_is_constant():
    mixes = {
        "own": {"private": 1.0},
        "other": {"global": 1.0},
        "frozen": {"frozen:global": 1.0},
        "both": {"frozen:private": 0.5, "global": 0.5},
        "received": {"received:private": 1.0},
        "previous": {"previous:private": 1.0},
        "learned": {"global": lambda state: torch.ones(())},
    }
    assert constant_views(mixes, ("private",)) == {"other", "frozen", "received", "previous"}
    assert constant_views(mixes, ("private", "global")) == {"received", "previous"}


def test_single_passes_and_dropout_keep_nothing(tiny_federation):
    def kept(*words):
        training = tiny_federation("moon", *words).context
        return training.constant_views(training.phases[0])

    assert kept() == frozenset()
    assert kept("train.epochs=2") == {"received", "previous"}
    assert kept("train.steps=5") == {"received", "previous"}
    assert kept("train.epochs=2", "tuner=lora", "tuner.dropout=0.1") == frozenset()


def test_rows_that_were_not_seen_are_not_known(tiny_federation):
    silo = tiny_federation("fedavg").silos["gamma"]
    rows = next(iter(silo.train.values()))
    anchors = ConstantViews(["received"])
    batch, other = make_batch(rows, [3, 1, 2], 0), make_batch(rows, [1, 4], 0)
    values = torch.arange(3.0).unsqueeze(1)
    anchors.put("received", batch, slice(0, 3), {"mean": values})
    value_of = {row: float(values[at]) for at, row in enumerate(batch.rows.tolist())}
    cached = anchors.get("received", make_batch(rows, [2, 3], 0), slice(0, 2))
    assert cached is not None
    assert cached["mean"].flatten().tolist() == [value_of[row] for row in make_batch(rows, [2, 3], 0).rows.tolist()]
    assert anchors.get("received", other, slice(0, 2)) is None
    assert anchors.get("previous", batch, slice(0, 3)) is None
