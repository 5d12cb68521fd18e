"""Same seed, same bits: for any order of silos, and in any state of the process's generators."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from silotune.core.tensors import digest, flatten
from silotune.training.coordinator import Coordinator
from tests.support.method_cases import CASES, ONE_TASK_ROWS, TRAIN_ROWS, every_case, of_kinds, same, tapped


@pytest.mark.parametrize("case", of_kinds(CASES, ("fedmcp", "feddpa-t, dropout", "fedproto", "server-only")))
def test_another_seed_other_bits(federate, reference, case, tmp_path):
    _, wire = reference(case)  # the rows are those of data.seed, here and there
    with tapped() as other:
        federate.run(case, tmp_path / "other", "seed=2", "rounds=1")
    for (number, silo), result in other.results.items():
        before = wire.results[number, silo]
        assert digest(flatten(result.state)) != digest(flatten(before.state))
    assert not {message for _, _, message in other.up} & {message for _, _, message in wire.up}


@every_case
def test_same_seed_same_bits_also_for_silos_in_another_order(federate, reference, case, tmp_path, monkeypatch):
    """Silos are named in another order in the configuration, and run in another order by the engine.

    The process's own generators stand elsewhere than before the first run.
    """
    run, _ = reference(case)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.rand(17)
    choose, orders = Coordinator.choose, []

    def backwards(self, number, silos):
        orders.append(choose(self, number, silos)[::-1])
        return orders[-1]

    monkeypatch.setattr(Coordinator, "choose", backwards)
    names = list(ONE_TASK_ROWS if CASES[case].one_task else TRAIN_ROWS)
    turned = federate.run(case, tmp_path / "turned", f"data.tasks=[{','.join(names[1:] + names[:1])}]")
    assert orders == [sorted(run.federation.silos, reverse=True)] * 2
    assert same(turned.summary) == same(run.summary)


def test_the_generators_of_the_process_are_left_alone(federate, tmp_path):
    """A user's own draws continue as if there had been no run between them."""

    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def draws() -> tuple[object, ...]:
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    seed()
    expected = draws()
    seed()
    federate.run("fedavg-full", tmp_path / "run", "rounds=1", "train.steps=1")  # with dropout
    assert draws() == expected
