"""Compute the gradients of single rows in a phase that trains heads on the untouched backbone, all rows at once.

Nothing below such a head has a gradient, so a row's gradient follows from its vector, which is kept over rounds:
`torch.func.vmap` takes the phase's own loss over rows instead of a graph with a copy of the head for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.func import grad, vmap

from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.data.tokenized import TokenizedRows
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining, Step, local_training
from silotune.models.forward.views import View
from silotune.training.context import TrainingContext

Terms = dict[str, Tensor]


def reads_vectors_alone(context: TrainingContext, phase: Phase, sets: Sequence[TokenizedRows]) -> bool:
    """Return whether a phase reads nothing of rows but their vectors under the untouched backbone and their labels."""
    pooled = all(head.reading(context.backbone, rows.task) is None for head in context.heads for rows in sets)
    return bool(phase.views) and not any(phase.views.values()) and pooled


def gradients_of_rows(
    context: TrainingContext,
    phase: Phase,
    rows: TokenizedRows,
    chosen: Tensor,
    state: State,
    received: State,
    memory: Tensors,
    training: LocalTraining,
) -> tuple[State, Terms]:
    """Return each row's gradient and loss terms, all of shape (rows, …).

    Args:
        context: has the rows' vectors.
        phase: `reads_vectors_alone`.
        rows: the set that the rows are of.
        chosen: their indices, shape (rows,).
        state: all parts; terms of the loss that depend on no row (`Step.without_rows`) are left out.
        received: part → tensors as this round's message brought them.
        memory: tensors that the silo keeps between participations.
        training: what `Method.train` shows in the loss.
    """

    def loss_of(trained: State, vectors: Tensors, label: Tensor, row: Tensor) -> tuple[Tensor, Terms]:
        view = View({name: vector[None] for name, vector in vectors.items()})
        batch = Batch(rows.task, row[None], label[None], (), rows)
        views = dict.fromkeys(phase.views, view)
        parts = context.parts
        step = Step(batch, views, state | trained, received, memory, parts, recipe=context.recipe, apart=[])
        loss = phase.loss(step)
        return loss, {"loss": loss.detach(), **step.terms}

    trained = {name: {key: tensor.detach() for key, tensor in state[name].items()} for name in phase.trains}
    assert context.untouched is not None, "in training vectors are kept"
    tables = context.untouched.of(rows)
    vectors = {name: table[chosen.to(table.device)] for name, table in tables.items()}
    labels = rows.labels[chosen].to(context.backbone.device)
    with local_training(training):
        of_rows = vmap(partial(grad(loss_of, has_aux=True), trained), in_dims=(0, 0, 0))
        gradients, terms = of_rows(vectors, labels, chosen.to(labels.device))
    return gradients, terms
