"""The learning rate of every step: transformers' schedules, over a phase or over all rounds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import optimization

from silotune.config import TrainConfig
from silotune.core.tensors import digest, flatten
from silotune.training.phase_optimizer import Schedule

THEIRS = {
    "constant": optimization._get_constant_schedule_with_warmup_lr_lambda,
    "linear": optimization._get_linear_schedule_with_warmup_lr_lambda,
    "cosine": optimization._get_cosine_schedule_with_warmup_lr_lambda,
}
ONLY = {"linear": ("num_training_steps",), "cosine": ("num_training_steps", "num_cycles"), "constant": ()}


@pytest.mark.parametrize("warmup", [0, 0.25, 0.3, 3, 40])
@pytest.mark.parametrize("schedule", THEIRS)
def test_rates_are_those_of_transformers(schedule, warmup):
    steps, lr = 13, 3e-4
    first = {0.25: 4, 0.3: 4}.get(warmup, warmup)  # a share is rounded up
    more = {"num_training_steps": steps, "num_cycles": 0.5}
    theirs = partial(THEIRS[schedule], num_warmup_steps=first, **{key: more[key] for key in ONLY[schedule]})
    ours = Schedule.of(TrainConfig(lr=lr, schedule=schedule, warmup=warmup), steps, 5, 7)
    for step in range(steps):
        assert ours.rate(step) == pytest.approx(lr * theirs(step), rel=1e-12, abs=1e-18)


def test_over_all_rounds_a_round_goes_on_where_the_last_one_ended():
    train = TrainConfig(lr=1.0, schedule="linear", schedule_over="run", warmup=0.1)
    whole = Schedule.of(train.model_copy(update={"schedule_over": "round"}), 30, 1, None)
    for number in (1, 2, 3):
        part = Schedule.of(train, 10, number, 3)
        assert [part.rate(step) for step in range(10)] == [whole.rate(10 * (number - 1) + step) for step in range(10)]
    once = Schedule.of(train, 10, 3, None)  # a phase at the end of the run has a span of its own
    assert once.rate(1) == 1.0
    assert once.rate(9) == pytest.approx(1 / 9)


def test_the_coordinators_training_has_its_own_rate(tiny_federation, monkeypatch):
    rates, step = set(), torch.optim.Adam.step

    def recorded(optimizer, *args, **more):
        rates.update(group["lr"] for group in optimizer.param_groups)
        return step(optimizer, *args, **more)

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    federation = tiny_federation("fedfame", "head=linear", "train.lr=0.5", "train.server_lr=0.25")
    federation.trainer.server_step(federation.server, federation.coordinator.shared, 1)
    assert rates == {0.25}
    rates.clear()
    tiny = tiny_federation("fedavg", "train.lr=0.5", "train.server_lr=0.25")
    tiny.trainer.rounds([tiny.silos["alpha"]], tiny.coordinator.shared, 1)
    assert rates == {0.5}


def test_new_silos_adapt_by_the_whole_schedule(tiny_federation):
    """After the last round, a schedule over all rounds is at 0; a silo that joins then still learns."""
    words = ("train.schedule=linear", "train.schedule_over=run", "rounds=2")
    federation = tiny_federation("local", *words)
    silo, shared = federation.silos["alpha"], federation.coordinator.shared
    before = federation.context.state_of(silo).private
    after = federation.trainer.adapt(silo, shared, 3, from_start=True)
    assert digest(flatten(after)) != digest(flatten(before))
