"""How strongly rows pull: for every head that a policy allows, in every way in which a step's gradients are made."""

from __future__ import annotations

import pytest
import torch

from silotune.core.tensors import flatten
from silotune.data.batching import make_batch
from silotune.methods.parts import Scope, names_with
from silotune.training.row_influence import RowInfluence

HEADS = {
    "mlp": ("fedavg", "mlp"),
    "smoothed": ("fedmcp", "mlp", "train.label_smoothing=0.1"),
    "verbalizer": ("moon", "verbalizer"),
    "lm": ("fedavg", "lm"),
    "dpo": ("fedit", "dpo"),
    "in pieces": ("fedavg", "mlp", "train.tokens_at_once=64"),
    "mixed heads": ("apfl", "mlp"),
    "followed": ("pfedme", "mlp"),
    "in two passes": ("moon", "mlp", "train.tokens_at_once=96"),
}


@pytest.mark.parametrize("words", HEADS.values(), ids=HEADS)
def test_each_row_pulls(make, words):
    federation = make(*words, "tuner=lora", "train.steps=", "train.epochs=1", "train.batch_size=4", on_cuda=False)
    context, shared = federation.context, federation.coordinator.shared
    silo = next(iter(federation.silos.values()))
    (rows,) = silo.train.values()
    plain = federation.trainer.rounds([silo], shared, 1)[0]
    context.influence = RowInfluence(names_with(context.parts, Scope.SHARED))
    watched = federation.trainer.rounds([silo], shared, 1)[0]
    before, after = flatten(plain.state), flatten(watched.state)
    assert all(torch.equal(before[name], after[name]) for name in before)  # looking on changes no bit
    assert context.influence._pulls
    for pulls in context.influence._pulls.values():
        assert int((pulls > 0).sum()) == rows.examples
    assert 1 < context.influence.effective_rows() <= rows.examples + 1e-6


def test_a_pull_is_the_norm_of_softmax_minus_label(make):
    federation = make(
        "fedavg", "mlp", "tuner=lora", "train.steps=", "train.epochs=1", "train.batch_size=64", on_cuda=False
    )
    context, silo = federation.context, next(iter(federation.silos.values()))
    context.influence = RowInfluence(names_with(context.parts, Scope.SHARED))
    federation.trainer.rounds([silo], federation.coordinator.shared, 1)
    (found,) = (pulls for key, pulls in context.influence._pulls.items() if len(key) == 4)  # of the head
    (rows,) = silo.train.values()
    batch = make_batch(rows, range(len(rows)), context.backbone.pad_id)
    state = context.place(federation.coordinator.shared | context.state_of(silo).private)
    expected = context.logits(state, batch).softmax(1)
    expected[torch.arange(len(rows)), batch.labels] -= 1
    assert torch.allclose(found[batch.rows], expected.norm(dim=1).double(), atol=1e-5)
