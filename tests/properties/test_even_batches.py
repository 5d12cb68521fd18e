"""`train.batches=even`: as many steps as with full batches, every row once in a pass, and every row of one weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from silotune.core.tensors import flatten
from silotune.data.batching import epoch_batches
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.training.phase_batches import phase_batches
from tests.support.method_cases import every_method

SIZE = 7


def rows_of(count: int, name: str = "t") -> TokenizedRows:
    return TokenizedRows(Task(name, ("a", "b")), [[1] * 5] * count, None, torch.zeros(count).long())


@pytest.mark.parametrize("count", [1, 6, 7, 8, 9, 15, 57, 63, 64, 100])
def test_sizes_and_weights(count):
    data = {"t": rows_of(count), "u": rows_of(13, "u")}
    full, even = (list(epoch_batches(data, SIZE, 0, 1, "order", even=even)) for even in (False, True))
    assert Counter(batch.task.name for batch in even) == Counter(batch.task.name for batch in full)
    for task, number in (("t", count), ("u", 13)):
        own = [batch for batch in even if batch.task.name == task]
        assert sorted(torch.cat([batch.rows for batch in own]).tolist()) == list(range(number))
        sizes = {len(batch) for batch in own}
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= SIZE
        assert [batch.weight / len(batch) for batch in own] == pytest.approx([len(own) / number] * len(own))
    assert {batch.weight for batch in full} == {1.0}


def test_rows_that_fill_their_batches_are_cut_as_ever():
    full, even = (list(epoch_batches({"t": rows_of(56)}, SIZE, 0, 1, even=even)) for even in (False, True))
    assert [batch.rows.tolist() for batch in even] == [batch.rows.tolist() for batch in full]
    assert {batch.weight for batch in even} == {1.0}


@every_method
def test_every_method_takes_as_many_steps(method, tiny_federation):
    words = (f"train.batch_size={SIZE}", "train.epochs=2")
    federation = tiny_federation(method, *words)
    context = federation.context
    full = context.train
    for silo in federation.silos.values():
        for phase in context.phases:
            counts = []
            for batches in ("full", "even"):
                context.train = full.model_copy(update={"batches": batches})
                drawn = list(phase_batches(context, silo, phase, 1))
                assert len(drawn) == context.steps(silo, phase)
                seen = Counter((batch.task.name, row) for batch in drawn for row in batch.rows.tolist())
                assert set(seen.values()) == {context.epochs(phase) * phase.steps_per_batch}
                assert len(seen) == sum(map(len, silo.train.values()))
                counts.append(len(drawn))
            assert counts[0] == counts[1]


def test_rows_weigh_alike_in_sgd_of_a_small_rate(tiny_federation):
    """The change of an epoch is that of one batch of all rows, times the steps; with full batches it is not."""
    words = ("train.optimizer=sgd", "train.lr=1e-4", "data.tasks=[alpha]", "method.adapters=1")

    def change(*more):
        federation = tiny_federation("fedavg", *words, *more)
        silo, shared = federation.silos["alpha"], federation.coordinator.shared
        rows = silo.train["alpha"]
        kept = list(range(57))
        fewer = replace(rows, ids=[rows.ids[row] for row in kept], labels=rows.labels[kept])
        fewer = replace(fewer, types=None if rows.types is None else [rows.types[row] for row in kept])
        (result,) = federation.trainer.rounds([replace(silo, train={"alpha": fewer})], shared, 1)
        after, before = flatten({name: result.state[name] for name in shared}), flatten(shared)
        return torch.cat([(after[name] - before[name]).double().reshape(-1) for name in sorted(before)])

    whole = 8 * change("train.batch_size=57")
    even, full = (change("train.batch_size=8", f"train.batches={batches}") for batches in ("even", "full"))
    off_even, off_full = ((other - whole).norm() / whole.norm() for other in (even, full))
    assert off_even < 0.01
    assert off_full > 5 * off_even
