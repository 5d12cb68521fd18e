"""`Step`: the arguments of a loss; `proximal` and `previous_tensors` for losses; `mean_over_rows` marks a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.methods.head_mix import WhichHead, head_tensors, heads_of
from silotune.methods.parts import HEAD, Part
from silotune.models.forward.views import View
from silotune.models.heads import PLAIN, Head, LossRecipe

REFERENCE = "reference"
"""The view of the backbone without any part, for heads that read it (`Head.reads_reference`)."""

PREVIOUS = "previous"
"""Prefix of the tensor names under which a silo's memory keeps the parts in `Method.remembers`."""


def previous_tensors(memory: Tensors, part: str) -> Tensors:
    """Return the tensors of a remembered part; empty before the silo's first participation."""
    prefix = f"{PREVIOUS}/{part}/"
    return {key.removeprefix(prefix): tensor for key, tensor in memory.items() if key.startswith(prefix)}


def proximal(tensors: Tensors, anchor: Tensors) -> Tensor:
    """Return `‖w − anchor‖²` over all tensors of a part, shape (); 0 of a part without tensors."""
    if not tensors:
        return torch.zeros(())
    return torch.stack([(tensor - anchor[name]).square().sum() for name, tensor in tensors.items()]).sum()


_WORK = ("loss", "steps", "skipped_steps", "rows", "real_tokens", "padded_tokens", "seconds")

EVENT_KEYS = frozenset(("event", "time", "round", "silo", "note", "bytes_up", "bytes_down", *_WORK))
"""Keys of the events of a silo's round; a term of a loss cannot have such a name."""


@dataclass
class Step:
    """The arguments of a loss: one batch, its views, and the silo's parts, anchors and memory.

    A loss may draw with torch's own generator, which is seeded for each step.

    Args:
        batch: the rows.
        views: name → computed view.
        state: part → tensors, with gradients where the phase trains the part.
        received: part → tensors as this round's message brought them.
        memory: tensors that the silo keeps between participations.
        modules: the method's parts by name.
        terms: terms of the loss for the log, filled by `log`.
        recipe: label smoothing and class weights of training.
    """

    batch: Batch
    views: dict[str, View]
    state: State
    received: State
    memory: Tensors
    modules: Mapping[str, Part]
    terms: dict[str, Tensor] = field(default_factory=dict)
    recipe: LossRecipe = PLAIN

    def logits(self, view: str, head: WhichHead = HEAD) -> Tensor:
        """Return a head's logits over a view, shape (rows, classes)."""
        module, tensors = self._head(head)
        return module.logits(tensors, self.views[view], self.batch.task)

    def cross_entropy(self, view: str, head: WhichHead = HEAD) -> Tensor:
        """Return the head's loss, shape (): the mean cross-entropy of labels or of responses' tokens, or DPO's loss."""
        module, tensors = self._head(head)
        if module.reads_reference:
            return module.referenced_loss(tensors, self.views[view], self.views[REFERENCE], self.batch)
        return module.training_loss(tensors, self.views[view], self.batch, self.recipe)

    def label_counts(self) -> Tensor:
        """Return how many of the silo's rows each label has, shape (classes,); of its batch, where that is alone."""
        labels = self.batch.labels if self.batch.source is None else self.batch.source.labels
        return torch.bincount(labels, minlength=len(self.batch.task.labels))

    def previous(self, part: str) -> Tensors:
        """Return a part as of the end of the silo's last participation; in its first one, as received."""
        return previous_tensors(self.memory, part) or self.received[part]

    def _head(self, head: WhichHead) -> tuple[Head, Tensors]:
        name = heads_of(head)[0]
        module = self.modules[name].module
        assert isinstance(module, Head), f"part {name!r} is no head"
        return module, head_tensors(head, self.state, self.received)

    def log(self, **terms: Tensor) -> None:
        """Record terms of the loss, shape () each, for the event log.

        Raises:
            ValueError: the log itself uses a term's name.
        """
        taken = sorted(terms.keys() & EVENT_KEYS)
        if taken:
            raise ValueError(f"a loss term may not be called {taken[0]!r}: the event log uses that name itself")
        self.terms.update({name: term.detach() for name, term in terms.items()})


Loss = Callable[[Step], Tensor]
"""A phase's loss: the scalar to minimize, shape ()."""


def mean_over_rows(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mark a loss as the mean of what it is on pieces of the batch, each weighted by `Head.loss_units`.

    That holds if it adds nothing but cross-entropies of heads, other means over rows where heads take means over rows
    too, and terms that depend on no row; and if it draws no random numbers. With `train.tokens_at_once` the pieces are
    then trained one after the other, in one pass. An override has to be marked again.
    """
    loss.mean_over_rows = True  # type: ignore[attr-defined]
    return loss
