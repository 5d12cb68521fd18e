"""Compute the gradients of single rows in a phase that trains heads on the untouched backbone, all rows at once.

Nothing below such a head has a gradient, so a row's gradient follows from its vector, which is kept over rounds:
`torch.func.vmap` takes the phase's own loss over rows instead of a graph with a copy of the head for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vmap

from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.data.tokenized import TokenizedRows
from silotune.methods.phase import Phase
from silotune.methods.step import LocalTraining, Step, local_training
from silotune.models.forward.views import View
from silotune.training.context import TrainingContext
from silotune.training.row_privacy import Place
from silotune.training.silo import Silo
from silotune.training.step_gradients import Terms

_Others = tuple[State, State, Tensors]
"""All parts of the silo, the received ones, and its memory."""


class UntouchedGradients:
    """The gradients of a silo's rows in a phase that `reads_vectors_alone`; their vectors are computed at first."""

    def __init__(self, context: TrainingContext, silo: Silo, phase: Phase, training: LocalTraining) -> None:
        assert context.untouched is not None, "in training vectors are kept"
        self._context, self._phase, self._sets, self._training = context, phase, silo.train, training
        self._vectors = {task: context.untouched.of(rows) for task, rows in silo.train.items()}

    def of(
        self, places: Sequence[Place], state: State, received: State, memory: Tensors
    ) -> tuple[list[Tensor], list[Tensor], list[Terms]]:
        """Return what `NoisedSteps._row_gradients` does.

        Shapes depend on the number of rows alone: where a silo has several tasks, each takes a place for every row.
        """
        trained = {name: {key: each.detach() for key, each in state[name].items()} for name in self._phase.trains}
        others, logged = (state, received, memory), [Terms() for _ in places]
        total = [each.new_zeros(len(places), *each.shape) for own in trained.values() for each in own.values()]
        for task, rows in self._sets.items():
            mine = torch.tensor([name == task for name, _ in places])
            indices = torch.tensor([row if name == task else 0 for name, row in places])
            of_row = partial(grad(partial(self._loss, rows, others), has_aux=True), trained)
            vectors = {name: table[indices.to(table.device)] for name, table in self._vectors[task].items()}
            labels = rows.labels[indices].to(self._context.backbone.device)
            with local_training(self._training):
                gradients, terms = vmap(of_row)(vectors, labels, indices.to(labels.device))
            flat = [each for name in self._phase.trains for each in gradients[name].values()]
            for into, each in zip(total, flat, strict=True):
                into += torch.where(mine.to(each.device).view(-1, *[1] * (each.dim() - 1)), each, 0.0)
            for index in mine.nonzero().flatten().tolist():
                logged[index] = {name: term[index] for name, term in terms.items()}
        return total, self._without_rows(trained, others), logged

    def _loss(
        self, rows: TokenizedRows, others: _Others, trained: State, vectors: Tensors, label: Tensor, row: Tensor
    ) -> tuple[Tensor, Terms]:
        """Return a row's loss, shape (), and its terms."""
        loss, terms, _ = self._step(rows, others, trained, vectors, label, row)
        return loss, terms

    def _step(
        self, rows: TokenizedRows, others: _Others, trained: State, vectors: Tensors, label: Tensor, row: Tensor
    ) -> tuple[Tensor, Terms, list[Tensor]]:
        context, apart = self._context, list[Tensor]()
        state, received, memory = others
        views = dict.fromkeys(self._phase.views, View({name: vector[None] for name, vector in vectors.items()}))
        batch = Batch(rows.task, row[None], label[None], (), rows)
        step = Step(batch, views, state | trained, received, memory, context.parts, recipe=context.recipe, apart=apart)
        loss = self._phase.loss(step)
        return loss, {"loss": loss.detach(), **step.terms}, apart

    def _without_rows(self, trained: State, others: _Others) -> list[Tensor]:
        """Return the gradients of the loss terms that depend on no row (`Step.without_rows`)."""
        leaves = {
            name: {key: each.clone().requires_grad_() for key, each in own.items()} for name, own in trained.items()
        }
        flat = [each for own in leaves.values() for each in own.values()]
        task, rows = next(iter(self._sets.items()))
        vectors, first = {name: table[0] for name, table in self._vectors[task].items()}, torch.tensor(0)
        with local_training(self._training):
            label = rows.labels[0].to(self._context.backbone.device)
            *_, apart = self._step(rows, others, leaves, vectors, label, first)
        return gradients_of(apart, flat)


def reads_vectors_alone(context: TrainingContext, phase: Phase, silo: Silo) -> bool:
    """Return whether a phase reads nothing of rows but their vectors under the untouched backbone and their labels."""
    tasks = [rows.task for rows in silo.train.values()]
    pooled = all(head.reading(context.backbone, task) is None for head in context.heads for task in tasks)
    return bool(phase.views) and not any(phase.views.values()) and pooled


def gradients_of(terms: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum of terms, zeros where they do not depend on a leaf."""
    roots = [term for term in terms if term.requires_grad]
    gradients = torch.autograd.grad(roots, leaves, allow_unused=True) if roots else [None] * len(leaves)
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(gradients, leaves, strict=True)]
