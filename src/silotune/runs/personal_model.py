"""`PersonalModel`: `predict` texts' labels, `write` answers; `explain` gives each text's weights in the mix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from silotune.core.tensors import State
from silotune.data.generation_rows import asked_row
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.instance_vectors import personalized_state, weigh
from silotune.evaluation.predict import answers, logits
from silotune.models.forward.mixing import resolve_weights
from silotune.models.tuners.token_weight import TokenWeight
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo

Text = str | tuple[str, str] | list[dict[str, Any]]
"""A text, a pair of texts, or a conversation as a list of turns."""


@dataclass(frozen=True)
class Prediction:
    """What a model says of one text.

    Args:
        label: its label; empty for a number or several labels.
        probabilities: of every label, in all 1, or with several labels each its own; empty for a number.
        value: the number of a regression.
        labels: those whose probability is above ½, where a row has several.
    """

    label: str
    probabilities: dict[str, float] = field(default_factory=dict)
    value: float | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """The mix that answers one text.

    Args:
        mix: weight of each part.
        alpha: weight of the local part (or of the global one, see `method.weight_of`), if the method weights each text.
        similarities: the text's similarities to the silo's rows that were drawn for it; `alpha` follows from them.
    """

    mix: dict[str, float]
    alpha: float | None = None
    similarities: list[float] | None = None


class PersonalModel:
    """A silo's personalized model.

    Args:
        context: backbone and method.
        silo: the silo, with its state.
        shared: the shared parts.
        task: the task that it answers.
        texts_per_row: number of texts in a row of the task (2 for pairs).
    """

    def __init__(self, context: TrainingContext, silo: Silo, shared: State, task: Task, texts_per_row: int) -> None:
        self.context = context
        self.state = personalized_state(context, silo, shared)
        self.task = task
        self.texts_per_row = texts_per_row

    def predict(self, texts: Sequence[Text]) -> list[Prediction]:
        """Predict the labels or numbers of texts, or of pairs of texts."""
        if not self.task.labeled:
            raise InputError(f"predict: task {self.task.name!r} is one of generation; use write")
        outputs = logits(self.context, self.state, self._encoded(texts))
        if self.task.kind == "regression":
            return [Prediction("", value=value) for value in outputs[:, 0].tolist()]
        several = self.task.kind == "multilabel"
        probabilities = (torch.sigmoid(outputs) if several else torch.softmax(outputs, -1)).tolist()
        by_label = [dict(zip(self.task.labels, row, strict=True)) for row in probabilities]
        if several:
            return [Prediction("", row, labels=tuple(label for label in row if row[label] > 0.5)) for row in by_label]
        return [Prediction(max(row, key=row.__getitem__), row) for row in by_label]

    def write(self, instructions: Sequence[Text]) -> list[str]:
        """Answer instructions, pairs of instruction and input, or conversations (lists of turns)."""
        if self.task.kind != "generation":
            raise InputError(f"write: task {self.task.name!r} is one of {self.task.kind}; use predict")
        return answers(self.context, self.state, self._encoded(instructions))

    def explain(self, texts: Sequence[Text]) -> list[Explanation]:
        """Return the weights of the model's parts for each text."""
        prediction = self.context.method.prediction()
        weights = weigh(self.context, self.state, self._encoded(texts))
        if weights is None:
            resolved = resolve_weights(prediction.mix, self.state)
            fixed = {name: float(weight) for name, weight in resolved.items() if not isinstance(weight, TokenWeight)}
            if len(fixed) < len(resolved):
                name = self.context.method.name
                raise InputError(f"explain: method {name} weighs its adapters per token, not per text")
            return [Explanation(fixed) for _ in texts]
        mix = {name: torch.as_tensor(weight).tolist() for name, weight in prediction.mixed(weights.alpha).items()}
        return [
            Explanation({name: weight[row] for name, weight in mix.items()}, alpha, similarities)
            for row, (alpha, similarities) in enumerate(
                zip(weights.alpha.tolist(), weights.similarities.tolist(), strict=True)
            )
        ]

    def _encoded(self, texts: Sequence[Text]) -> TokenizedRows:
        """Return texts as token ids; the missing input of an instruction is empty."""
        if isinstance(texts, str):
            raise InputError("predict: give a list of texts, not one text")
        rows = [self._row(text) for text in texts]
        numbers = {len(row.texts) for row in rows}
        if len(numbers) > 1:
            raise InputError("predict: give either single texts or pairs, not both")
        if self.task.labeled and numbers - {self.texts_per_row}:
            wanted = "single texts" if self.texts_per_row == 1 else "pairs of texts"
            raise InputError(f"predict: task {self.task.name!r} takes {wanted}")
        context = self.context
        tokenize = context.method.setting.head.row_tokenizer(context.backbone, context.train.max_length)
        return tokenize(self.task, rows)

    def _row(self, text: Text) -> Row:
        if isinstance(text, str):
            return Row((text, "") if self.task.kind == "generation" else (text,), 0)
        if isinstance(text, tuple):
            return Row(tuple(text), 0)
        return asked_row(text, "predict")
