"""Tasks: the label names, metric and kind that give rows their meaning; which metrics there are."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from silotune.config.registries import KINDS
from silotune.errors import InputError, unknown_name_error

LABEL_METRICS = ("accuracy", "f1", "macro_f1", "balanced_accuracy", "mcc", "auroc")
"""Metrics of rows with one label each, in percent. F1 is of the positive class, as MRPC and QQP are judged."""

TEXT_METRICS = ("rouge1", "rougeL", "exact_match", "accuracy")
"""Metrics of written answers, in percent; accuracy is of answers that are options."""

NUMBER_METRICS = ("pearson_spearman", "pearson", "spearman", "mse", "mae")
"""Metrics of numbers; the first is the usual one."""

ERROR_METRICS = ("mse", "mae")
"""Metrics of numbers in units of the labels; **lower is better**."""

LABEL_SET_METRICS = ("micro_f1", "macro_f1", "accuracy", "auroc")
"""Metrics of rows with several labels; the first is the usual one."""

SPAN_METRICS = ("span_f1", "partial_f1", "span_recall")
"""Metrics of marked spans; the first is the usual one."""

RANK_METRICS = ("ndcg10", "mrr", "recall1", "recall10")
"""Metrics of ranked passages, one of which is right for a query; the first is the usual one."""

LOSS_METRICS = ("loss", "perplexity")
"""Metrics that follow from the mean loss of the head; **lower is better**. They need no written answers."""

LOSS = "loss"

NAMES = {
    "f1": "F1",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "mcc": "MCC",
    "auroc": "AUROC",
    "rouge1": "ROUGE-1",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
    "micro_f1": "micro F1",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "pearson_spearman": "mean of Pearson and Spearman",
    "mse": "MSE",
    "mae": "MAE",
    "span_f1": "span F1",
    "partial_f1": "partial span F1",
    "span_recall": "recall of spans",
    "ndcg10": "nDCG@10",
    "mrr": "MRR",
    "recall1": "recall@1",
    "recall10": "recall@10",
    "ece": "ECE",
    "log_loss": "log loss",
}
"""Metrics as tables and pages write them, where that is not the key itself."""

SIGNED = ("mcc", "pearson", "spearman", "pearson_spearman")
"""Metrics that may be negative, down to −100."""


class UndeclaredLabels(InputError):
    """Label names that are read from rows where they must be declared; that they are not is no matter of the rows."""


def metric_title(metric: str, positive: str = "") -> str:
    """Return a metric's name for display; F1 with the label that it is about."""
    name = NAMES.get(metric, metric)
    return f"{name} of {positive}" if metric == "f1" and positive else name


def lower_is_better(metric: str) -> bool:
    """Return whether a lower score by this metric is better; then it is not in percent."""
    return metric in (*LOSS_METRICS, *ERROR_METRICS) or any(metric in kind.lower for kind in KINDS.values())


def metric_range(metric: str) -> tuple[float, float]:
    """Return the lowest and the highest value of a metric."""
    if lower_is_better(metric):
        return 0.0, math.inf
    signed = metric in SIGNED or any(metric in kind.signed for kind in KINDS.values())
    return (-100.0 if signed else 0.0), 100.0


@dataclass(frozen=True)
class Task:
    """Meaning of a row's label or answer.

    Args:
        name: silos with the same task name share label names and may share a head.
        labels: label names; empty for regression and generation.
        metric: one of the kind's metrics (`Kind.metrics`).
        kind: what a row is answered with, a name of `KINDS`.
        positive: the label that F1 is about; empty if none is.
    """

    name: str
    labels: tuple[str, ...]
    metric: str = "accuracy"
    kind: str = "classification"
    positive: str = ""

    @property
    def rules(self) -> Any:
        """The task's `Kind` (`silotune.data.kinds`): how rows are read and answers are scored."""
        return KINDS[self.kind]()

    @property
    def positive_index(self) -> int:
        """The index of the label that F1 is about; −1 if none is."""
        return self.labels.index(self.positive) if self.positive else -1

    @property
    def outputs(self) -> int:
        """How many logits a head computes for a row, or for each position that it reads."""
        outputs: int = self.rules.outputs(self)
        return outputs

    @property
    def labeled(self) -> bool:
        """Whether rows have labels or numbers, which a head's logits are compared with; not so for generation."""
        labeled: bool = self.rules.labeled
        return labeled

    def label_index(self, label: str) -> int:
        """Return the index of a label, in whatever form it is written (`label_form`); −1 if there is no such label."""
        return self._indices.get(label, self._indices.get(label_form(label, self._truth_values), -1))

    @cached_property
    def _indices(self) -> dict[str, int]:
        forms = {label_form(label, self._truth_values): index for index, label in enumerate(self.labels)}
        return forms | {label: index for index, label in enumerate(self.labels)}

    @cached_property
    def _truth_values(self) -> bool:
        return are_truth_values(self.labels)

    def fields(self) -> dict[str, Any]:
        """Return the task as JSON values, which `read_task` reads."""
        fields = {"name": self.name, "labels": list(self.labels), "metric": self.metric, "kind": self.kind}
        return fields | ({"positive": self.positive} if self.positive else {})


def are_truth_values(labels: Collection[str]) -> bool:
    """Return whether labels are truth values, however they are written (`true` of JSON, `True` of pandas)."""
    return {label.casefold() for label in labels} == {"false", "true"}


def label_form(label: str, truth_value: bool) -> str:
    """Return the canonical form of a label: `1` for `1.0`, `true` for `True`, é as one character.

    A label that stands among truth values (`are_truth_values`) is one.
    """
    label = unicodedata.normalize("NFC", label)
    whole = re.fullmatch(r"(-?[0-9]{1,1000})\.0+", label)
    return whole[1] if whole else label.casefold() if truth_value else label


def label_spelling(label: str) -> str:
    """Return a key that is equal for labels that differ only in case, width, spaces, marks or leading zeros.

    Signs that may mean something stay: those of `A+`, `C#` and `-1`, and what stands between digits.
    """
    folded = unicodedata.normalize("NFKC", label).casefold()
    bare = re.sub(r"[\s_\u200b-\u200d\ufeff;:!?'\"()]|(?<=[^\W\d])-(?=[^\W\d])|[.,](?!\d)", "", folded)
    return re.sub(r"^(-?)0+(?=\d)", r"\1", bare) or label


def make_task(
    name: str,
    culprit: str,
    kind: str = "classification",
    labels: Sequence[str] = (),
    metric: str | None = None,
    positive: str | None = None,
) -> Task:
    """Make a task, after checking that its metric, labels and positive label fit its kind.

    The usual metric is the kind's first one; `f1` without a positive label becomes `macro_f1`. Errors name the
    `culprit`, a configuration key or file.
    """
    rules = KINDS.find(kind)
    metric = metric or rules.metrics[0]
    if metric not in rules.metrics:
        raise unknown_name_error(f"metric of {culprit}, whose rows are {rules.rows},", metric, rules.metrics)
    if not rules.one_label and len(labels) < rules.least_labels:  # of classes, `check_silo` says which silo has one
        needed = f"{rules.least_labels} label{'s'[: rules.least_labels - 1]}"
        raise InputError(f"{culprit}: kind={kind} needs at least {needed}, found {', '.join(labels) or 'none'}")
    if positive is not None and positive not in labels:
        raise unknown_name_error(f"positive label of {culprit}", positive, labels)
    if metric == "f1" and positive is None:
        metric = "macro_f1"
    return Task(name, tuple(labels), metric, kind, positive or "")


def numbered_positive(labels: Sequence[str]) -> str | None:
    """Return the positive one of two labels that a data set numbers 0 and 1, as GLUE does: label 1."""
    return labels[1] if len(labels) == 2 else None


def read_task(fields: Any) -> Task:
    """Parse a task from JSON values, as `Task.fields` writes them.

    Raises:
        ValueError: the value does not describe a task.
    """
    if not isinstance(fields, dict) or fields.keys() - {"positive"} != {"name", "labels", "metric", "kind"}:
        raise ValueError("not a task")
    name, metric, kind, labels = fields["name"], fields["metric"], fields["kind"], fields["labels"]
    if not isinstance(labels, list | tuple):
        raise ValueError("not a task's labels")
    positive = fields.get("positive", "")
    texts = all(isinstance(text, str) for text in (name, metric, kind, *labels))
    if texts and kind not in KINDS:
        raise ValueError(f"a task of kind {kind!r}, which is not known here; known: {', '.join(KINDS)}")
    if not texts or metric not in KINDS[kind].metrics:
        raise ValueError("not a task, or not a metric of its kind")
    if positive not in ("", *labels) or (metric == "f1" and not positive):
        raise ValueError("not a task's positive label")
    return Task(name, tuple(labels), metric, kind, positive)
