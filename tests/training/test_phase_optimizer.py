"""Training in float16: small gradients survive, a step whose gradients overflow is left out and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from silotune.core.tensors import flatten
from silotune.errors import Diverged
from silotune.training import phase_optimizer
from silotune.training.federation import Federation
from silotune.training.phase_optimizer import Schedule
from silotune.training.silo_round import LocalResult

HALF = ("tuner=lora", "precision=fp16", "train.optimizer=sgd", "train.lr=1")


@pytest.fixture
def federation_of(tiny_federation: Callable[..., Federation]) -> Callable[..., Federation]:
    """`federation_of(factor, *words)` → a federation whose losses are multiplied, and their steps divided, by factor.

    A factor by silo's name stands for those silos alone.
    """

    def make(factor: float, *words: str, only: str = "") -> Federation:
        federation = tiny_federation("fedavg", *HALF, f"train.lr={1 / factor:g}", *words)
        context = federation.context

        def scaled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(step):
                chosen = not only or step.batch.task.name == only
                return loss(step) * (factor if chosen else 1.0)

            return run

        context.phases = [replace(phase, loss=scaled(phase.loss)) for phase in context.phases]
        return federation

    return make


def rounds(federation: Federation, *names: str) -> list[LocalResult]:
    silos = [federation.silos[name] for name in names or ["alpha"]]
    return federation.trainer.rounds(silos, federation.coordinator.shared, 1)


def change(federation: Federation, result: LocalResult) -> Tensor:
    """How the shared tensors have changed, as one vector."""
    after, before = flatten(result.state), flatten(federation.coordinator.shared)
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before) if "global" in name])


def test_gradients_that_float16_cannot_hold_arrive(federation_of, monkeypatch):
    exact = federation_of(1e-6, "precision=fp32", "train.steps=2")
    expected = change(exact, rounds(exact)[0])
    federation = federation_of(1e-6, "train.steps=2")
    (result,) = rounds(federation)
    assert (change(federation, result) - expected).norm() < 0.05 * expected.norm()
    assert result.metrics["skipped_steps"] == 0
    monkeypatch.setattr(phase_optimizer, "INITIAL_SCALE", 1.0)  # without it, most of the gradients are zero
    lost = change(federation, rounds(federation)[0])
    assert (lost - expected).norm() > 0.5 * expected.norm()


def test_a_step_that_overflows_is_left_out_and_counted(federation_of, monkeypatch):
    monkeypatch.setattr(phase_optimizer, "INITIAL_SCALE", 2.0**26)
    federation = federation_of(1.0, "train.lr=0.01", "train.steps=16")
    (result,) = rounds(federation)
    assert 2 < result.metrics["skipped_steps"] < 16
    assert result.metrics["steps"] == 16
    moved = change(federation, result)
    assert moved.isfinite().all()
    assert moved.norm() > 0


@pytest.mark.parametrize("names", [("alpha",), ("alpha", "beta")])
def test_a_skipped_step_leaves_the_schedule_where_it_is(federation_of, monkeypatch, names):
    """As in transformers' Trainer, which steps the scheduler only after a step of the optimizer."""
    steps = 12
    monkeypatch.setattr(phase_optimizer, "INITIAL_SCALE", 2.0**26)
    federation = federation_of(1.0, "train.lr=0.01", f"train.steps={steps}", "train.schedule=linear", "train.warmup=3")
    rates, step = [], torch.optim.SGD.step

    def recorded(optimizer, *args, **more):
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args, **more)

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    results = rounds(federation, *names)
    taken = [steps - result.metrics["skipped_steps"] for result in results]
    assert all(0 < number < steps for number in taken)
    schedule = Schedule(federation.context.train, steps)
    assert sorted(rates) == sorted(schedule.rate(number) for each in taken for number in range(each))


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adafactor"])
def test_a_skipped_step_leaves_the_parts_as_they_are(federation_of, monkeypatch, optimizer):
    monkeypatch.setattr(phase_optimizer, "INITIAL_SCALE", 2.0**60)
    federation = federation_of(1.0, "train.lr=0.1", "train.steps=2", f"train.optimizer={optimizer}")
    (result,) = rounds(federation)
    assert result.metrics["skipped_steps"] == 2
    assert not change(federation, result).any()


def test_a_loss_that_is_not_finite_ends_the_run(federation_of):
    with pytest.raises(Diverged, match="alpha"):
        rounds(federation_of(float("inf"), "train.lr=0.01", "train.steps=1"))


def test_a_phase_begins_with_a_new_factor(federation_of, monkeypatch):
    monkeypatch.setattr(phase_optimizer, "INITIAL_SCALE", 2.0**26)
    federation = federation_of(1.0, "train.lr=0.01", "train.steps=12")
    (first,), (again,) = rounds(federation), rounds(federation)
    assert first.metrics["skipped_steps"] == again.metrics["skipped_steps"] > 0
    assert torch.equal(change(federation, first), change(federation, again))


def test_a_silo_that_overflows_costs_its_cohort_no_step(federation_of):
    federation = federation_of(2.0**24, "train.lr=1e-9", "train.steps=4", only="beta")
    alone = [rounds(federation, name)[0] for name in ("alpha", "beta")]
    together = rounds(federation, "alpha", "beta")
    assert [result.metrics["skipped_steps"] for result in alone] == [0, 4]
    assert [result.metrics["skipped_steps"] for result in together] == [0, 4]
    found, expected = change(federation, together[0]), change(federation, alone[0])
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert not change(federation, together[1]).any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_are_not_scaled(federation_of, precision):
    (result,) = rounds(federation_of(1.0, f"precision={precision}", "train.steps=1"))
    assert "skipped_steps" not in result.metrics
