"""A silo's model: predict labels, write answers, and explain how its parts were weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from silotune.config.backbone import PrecisionConfig
from silotune.core.files import damage_named
from silotune.core.serialization import read_tensor_file
from silotune.core.tensors import State
from silotune.data.generation_rows import asked_row
from silotune.data.kinds import Prediction
from silotune.data.rows import Row
from silotune.data.tasks import Task, read_task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError, unknown_name_error
from silotune.evaluation.instance_vectors import weigh
from silotune.evaluation.predict import answers, logits
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import resolve_device, resolve_precision
from silotune.models.backbone.loading import load_backbone
from silotune.models.forward.generation import generate
from silotune.models.forward.mixing import resolve_weights
from silotune.models.heads.lm import LanguageModelHead, prompt_rows
from silotune.models.tuners import Tuner
from silotune.models.tuners.base import TokenWeight
from silotune.runs.marked_texts import MarkedTexts
from silotune.runs.model_file import MODEL_FILE, TensorReader, check_weights, model_folder, read_model_file, read_state
from silotune.training.prediction import PredictionContext

Text = str | tuple[str, str] | list[dict[str, Any]] | dict[str, Any]
"""A text, a pair of texts, or a conversation as a list of turns, or as an object with `messages` and `tools`."""


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


@dataclass(eq=False, repr=False)
class PersonalModel:
    """A silo's personalized model, as its folder `models/NAME/` holds it.

    Args:
        context: backbone, parts and head.
        tuner: the tuner of the silo's adapters.
        state: the tensors of all parts, and of the vectors of the silo's rows where texts are weighed by them.
        task: the task that it answers.
        texts_per_row: number of texts in a row of the task (2 for pairs).
        about: the content of `model.json`.
    """

    context: PredictionContext
    tuner: Tuner
    state: State
    task: Task
    texts_per_row: int
    about: Mapping[str, Any]

    @classmethod
    def open(
        cls,
        folder: str | Path,
        backbone: Backbone | None = None,
        precision: str | None = None,
        device: str = "auto",
        read: TensorReader = read_tensor_file,
    ) -> PersonalModel:
        """Open a model's folder; nothing else is read but the backbone.

        Args:
            folder: `models/NAME` of a run, or a copy of it; also an export in silotune's layout.
            backbone: the model's backbone, if it is loaded already.
            precision: load the backbone in this precision instead of the run's.
            device: load it onto this device, as the key `device`.
            read: reads a file of tensors; a process with many models keeps what they have in common.
        """
        folder = Path(folder)
        with damage_named(folder / MODEL_FILE):
            about, file = read_model_file(folder / MODEL_FILE)
            tuner, head, prediction = file.tuner.make(), file.make_head(), file.prediction
            parts = {name: part.make(tuner, head) for name, part in file.parts.items()}
            task = read_task(file.task)
        state = read_state(folder, parts, file.files, read)
        if file.threads is not None:
            torch.set_num_threads(file.threads)
        check_precision(precision)
        precision = resolve_precision(precision or file.precision, resolve_device(device))
        if backbone is None:
            device_map = "auto" if file.backbone.device_map is not None and device == "auto" else None
            backbone = load_backbone(
                file.backbone.replace(device_map=device_map),
                precision=precision,
                device=device,
                keep_master=tuner.trains_backbone,
                model_class=head.model_class,
            )
        elif backbone.precision != precision:
            raise InputError(f"backbone: the one given runs in {backbone.precision}, {folder} wants {precision}")
        check_weights(folder, backbone, file.backbone_sha256)
        context = PredictionContext(
            backbone,
            parts,
            prediction,
            head,
            method=file.method["name"],
            max_length=file.max_length,
            rows_scored=file.rows_scored,
            rows_written=file.rows_written,
        )
        return cls(context, tuner, state, task, file.texts, about)

    def predict(self, texts: Sequence[Text]) -> list[Prediction]:
        """Predict the labels or numbers of texts, or of pairs of texts, or mark spans in them."""
        if not self.task.labeled:
            raise InputError(f"predict: task {self.task.name!r} is one of generation; use write")
        if self.task.rules.gives == "vectors":
            raise InputError(f"predict: task {self.task.name!r} is one of retrieval; use embed (`predict --query`)")
        if self.task.rules.by_position:
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise InputError("predict: give a list of single texts")
            marked = MarkedTexts(self.context, self.task, [str(text) for text in texts])
            outputs = logits(self.context, self.state, marked.rows) if len(marked.rows) else torch.zeros(0)
            return marked.predictions(outputs)
        return predictions(self.task, logits(self.context, self.state, self.encoded(texts)))

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of queries or passages, of length 1, shape (texts, hidden), for a task of retrieval."""
        if self.task.rules.gives != "vectors":
            raise InputError(f"embed: task {self.task.name!r} is one of {self.task.kind}; use predict or write")
        return logits(self.context, self.state, self.encoded(texts))

    def write(self, instructions: Sequence[Text], follow: Callable[[str], None] | None = None) -> list[str]:
        """Answer instructions, pairs of instruction and input, or conversations (lists of turns).

        Args:
            instructions: what is asked.
            follow: called with the answer so far after each token, if one instruction is answered greedily.
        """
        if self.task.labeled:
            raise InputError(f"write: task {self.task.name!r} is one of {self.task.kind}; use predict")
        return answers(self.context, self.state, self.encoded(instructions), follow)

    def untouched(self, instructions: Sequence[Text]) -> list[str]:
        """Answer as `write`, by the backbone alone, without any trained part."""
        head = self.context.head
        assert isinstance(head, LanguageModelHead), "a generation task has a language-model head"
        rows = prompt_rows(self.encoded(instructions))
        return generate(self.context.backbone, rows, [], head.generation, self.context.rows_written)

    def explain(self, texts: Sequence[Text]) -> list[Explanation]:
        """Return the weights of the model's parts for each text."""
        prediction = self.context.prediction
        weights = weigh(self.context, self.state, self.encoded(texts))
        if weights is None:
            resolved = resolve_weights(prediction.mix, self.state)
            fixed = {name: float(weight) for name, weight in resolved.items() if not isinstance(weight, TokenWeight)}
            if len(fixed) < len(resolved):
                name = self.context.method_name
                raise InputError(f"explain: method {name} weighs its adapters per token, not per text")
            return [Explanation(fixed) for _ in texts]
        mix = {name: torch.as_tensor(weight).tolist() for name, weight in prediction.mixed(weights.alpha).items()}
        return [
            Explanation({name: weight[row] for name, weight in mix.items()}, alpha, similarities)
            for row, (alpha, similarities) in enumerate(
                zip(weights.alpha.tolist(), weights.similarities.tolist(), strict=True)
            )
        ]

    def encoded(self, texts: Sequence[Text], max_length: int | None = None) -> TokenizedRows:
        """Return texts as token ids, cut at `max_length` or where the run cut its own."""
        if isinstance(texts, str):
            raise InputError("predict: give a list of texts, not one text")
        rows = [self._row(text) for text in texts]
        numbers = {len(row.texts) for row in rows}
        if len(numbers) > 1:
            raise InputError("predict: give either single texts or pairs, not both")
        if self.task.labeled and numbers - {self.texts_per_row}:
            kind = "single texts" if self.texts_per_row == 1 else "pairs of texts"
            raise InputError(f"predict: task {self.task.name!r} takes {kind}")
        context = self.context
        tokenize = context.head.row_tokenizer(context.backbone, max_length or context.max_length)
        return tokenize(self.task, rows)

    def _row(self, text: Text) -> Row:
        if isinstance(text, str):
            return Row((text,) if self.task.labeled else (text, ""), 0)
        if isinstance(text, tuple):
            return Row(tuple(text), 0)
        return asked_row(text, "predict")


def predictions(task: Task, outputs: Tensor) -> list[Prediction]:
    """Return what logits or numbers, shape (texts, outputs), mean for a task."""
    result: list[Prediction] = task.rules.predictions(task, outputs)
    return result


def check_precision(precision: str | None) -> None:
    """Refuse an unknown precision; None is the run's own."""
    names = get_args(PrecisionConfig.model_fields["name"].annotation)
    if precision is not None and precision not in names:
        raise unknown_name_error("precision", precision, names)


def load_model(
    folder: str | Path,
    silo: str,
    backbone: Backbone | None = None,
    precision: str | None = None,
    device: str = "auto",
) -> PersonalModel:
    """Open one silo's personalized model of a finished run; the files of other silos are not opened.

    Args:
        folder: the run folder.
        silo: the silo's name.
        backbone: the run's backbone, if it is loaded already.
        precision: load the backbone in this precision instead of the run's.
        device: load it onto this device, as the key `device`; the run's own may be missing here.
    """
    return PersonalModel.open(model_folder(Path(folder), silo), backbone, precision, device)
