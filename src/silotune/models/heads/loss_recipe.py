"""Compute a task's loss from logits, in training with label smoothing and class weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from silotune.config.train import ClassWeights
from silotune.data.batching import Batch


@dataclass(frozen=True)
class LossRecipe:
    """Label smoothing and class weights of the training loss; predictions and scores do not use them.

    Args:
        label_smoothing: the share of the true label's probability that is spread evenly over all labels.
        class_weights: label → weight, 1 where none is named; or `balanced`, by the labels' numbers of training rows.
    """

    label_smoothing: float = 0.0
    class_weights: ClassWeights = "none"

    @property
    def plain(self) -> bool:
        """Whether the loss is the head's own."""
        return not self.label_smoothing and self.class_weights == "none"

    @property
    def key(self) -> str:
        """The key that makes it another, for messages."""
        return "train.label_smoothing" if self.label_smoothing else "train.class_weights"

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the loss of a batch's logits, shape (): the mean over rows, weighted by their labels' weights.

        Args:
            logits: shape (rows, outputs).
            batch: the rows.
        """
        if batch.task.kind != "classification":  # `check_tasks` has refused all but the plain recipe
            return task_loss(logits, batch)
        weights = self._weights(batch)
        return nn.functional.cross_entropy(
            logits,
            batch.labels.to(logits.device),
            weight=None if weights is None else weights.to(logits),
            label_smoothing=self.label_smoothing,
        )

    def _weights(self, batch: Batch) -> Tensor | None:
        """Return the weight of each class, shape (classes,); None if all weigh the same."""
        names = batch.task.labels
        if isinstance(self.class_weights, Mapping):
            return torch.tensor([self.class_weights.get(name, 1.0) for name in names])
        if self.class_weights == "none":
            return None
        labels = batch.labels if batch.source is None else batch.source.labels
        counts = torch.bincount(labels, minlength=len(names))
        balanced = len(labels) / (int((counts > 0).sum()) * counts.clamp(min=1))
        return torch.where(counts > 0, balanced, torch.ones_like(balanced))  # a label without rows is only smoothed to


def task_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the plain loss of a batch's logits, shape (), by the kind of its task.

    Cross-entropy of labels; the squared error of numbers; the binary cross-entropy of several labels, as a mean over
    rows and labels.

    Args:
        logits: shape (rows, outputs).
        batch: the rows.
    """
    targets = batch.labels.to(logits.device)
    if batch.task.kind == "regression":
        return nn.functional.mse_loss(logits[:, 0], targets.to(logits.dtype))
    if batch.task.kind == "multilabel":
        return nn.functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))
    return nn.functional.cross_entropy(logits, targets)


PLAIN = LossRecipe()
"""A head's loss as it is."""
