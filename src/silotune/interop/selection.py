"""Choose which adapters, weights and head of a silo's model an export holds, and merge a mix into one adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from silotune.core.tensors import State, Tensors, copy
from silotune.errors import InputError, unknown_name_error
from silotune.interop.adapters import can_fold
from silotune.methods.parts import HEAD, Part, Scope
from silotune.methods.step import WhichHead, head_tensors, heads_of
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import joined_tensors, members, parts_in, resolve_weights
from silotune.models.heads import Head
from silotune.models.tuners import Tuner, Weight, WeightedTensors, tuner_of
from silotune.models.tuners.base import MergedAdapter, TokenWeight
from silotune.runs.personal_model import PersonalModel

WORDS = {"global": Scope.SHARED, "private": Scope.PRIVATE, "mixed": None, "merged": None}
"""Values of `--part`: an adapter by its scope, or the silo's whole model as one adapter or folded into the weights."""


@dataclass(frozen=True)
class ExportSelection:
    """Content of one export.

    Args:
        mix: weights of the exported adapters by part name.
        others: further changes of weights in the mix, with their tuners; weights alone can hold them.
        head_part: name of the head's part; of a mix of heads, their weights by part name.
        head_tensors: the head's tensors, their names without the task's.
    """

    model: PersonalModel
    word: str
    mix: dict[str, float]
    tuner: Tuner
    adapter: MergedAdapter
    others: tuple[tuple[Tuner, MergedAdapter], ...]
    head_part: WhichHead
    head_tensors: Tensors
    private: tuple[str, ...]
    prediction: dict[str, Weight | TokenWeight]

    @property
    def per_text(self) -> bool:
        """Whether the silo weights its adapters for each text; `prediction` then holds the weights before that."""
        return self.model.context.prediction.weighting is not None

    @property
    def whole(self) -> bool:
        """Whether the export predicts as the silo does."""
        predicted = heads_of(self.model.context.prediction.head)
        return not self.per_text and self.prediction == self.mix and predicted == heads_of(self.head_part)


def select(model: PersonalModel, word: str, alpha: float | None = None) -> ExportSelection:
    """Select the content of an export from a silo's model."""
    if word not in WORDS:
        raise unknown_name_error("part", word, WORDS)
    state, parts, backbone = model.state, model.context.parts, model.context.backbone
    prediction = resolve_weights(model.context.prediction.mix, state)
    mix = _mix(model, word, prediction if alpha is None else _fixed(model, word, alpha), alpha is not None)
    by_tuner, which = _by_tuner(parts, mix), _head_of(model, word, mix)
    names, head = [*parts_in(mix), *heads_of(which)], head_tensors(which, state)
    # of the silo's own task, without its name
    of_task = model.context.head.init(backbone, [model.task], torch.Generator().manual_seed(0))
    return ExportSelection(
        model,
        word,
        mix,
        model.tuner,
        merge(backbone, model.tuner, state, by_tuner.pop(model.tuner)),
        tuple((other, merge(backbone, other, state, weights)) for other, weights in by_tuner.items()),
        which,
        {name.removeprefix(f"{model.task.name}."): head[name] for name in of_task},
        tuple(name for name in names if parts[name].scope is Scope.PRIVATE and state.get(name)),
        prediction,
    )


def _by_tuner(parts: Mapping[str, Part], mix: Mapping[str, float]) -> dict[Tuner, dict[str, float]]:
    """Divide a mix by the tuners of its parts."""
    divided: dict[Tuner, dict[str, float]] = {}
    for name, weight in mix.items():
        tuner = tuner_of(parts[members(name)[0]].module)
        assert tuner is not None, "a mix names tuners' parts"
        divided.setdefault(tuner, {})[name] = weight
    return divided


def merge(backbone: Backbone, tuner: Tuner, state: State, mix: Mapping[str, float]) -> MergedAdapter:
    """Make one adapter of a mix of parts."""
    parts = [
        WeightedTensors(
            tuner.effective(
                backbone, {key: tensor.detach().cpu().float() for key, tensor in joined_tensors(state, name).items()}
            ),
            weight,
        )
        for name, weight in mix.items()
    ]
    if len(parts) == 1 and parts[0].weight == 1:
        return MergedAdapter(copy(parts[0].tensors), tuner.options_of(parts[0].tensors))
    return tuner.merge(parts)


def _fixed(model: PersonalModel, word: str, alpha: float) -> dict[str, Weight | TokenWeight]:
    """Return the mix at one weight for all texts."""
    weighting = model.context.prediction.weighting
    if weighting is None:
        raise InputError(f"--alpha: method {model.context.method_name} does not weigh texts; leave it out")
    if word not in ("mixed", "merged"):
        raise InputError("--alpha: belongs to --part mixed or merged")
    return {name: float(weight) for name, weight in weighting.mix(torch.tensor(alpha, dtype=torch.float64)).items()}


def _mix(model: PersonalModel, word: str, prediction: dict[str, Weight | TokenWeight], fixed: bool) -> dict[str, float]:
    """Return the weights of the exported adapters by part name, or refuse a part that there is not."""
    parts, tuner, method = model.context.parts, model.tuner, model.context.method_name
    adapters = {name: part for name, part in parts.items() if part.module is tuner}
    by_scope = {
        option: [name for name, part in adapters.items() if part.scope is scope]
        for option, scope in WORDS.items()
        if scope
    }
    allowed = [option for option, names in by_scope.items() if len(names) == 1] + ["mixed"]
    if can_fold(tuner):
        allowed.append("merged")
    if tuner.trains_backbone:
        allowed.remove("mixed")
    others = [name for name in parts_in(prediction) if tuner_of(parts[name].module) is not tuner]
    if others and word != "merged":
        raise InputError(
            f"--part {word}: method {method} also changes the frozen weights ({', '.join(others)}), which no adapter "
            "holds; allowed: merged"
        )
    if word not in allowed:
        table = "; ".join(f"{option}: {', '.join(names) or 'none'}" for option, names in by_scope.items())
        raise InputError(
            f"--part {word}: method {method} with tuner {tuner.name} has no such export (adapters: {table}); allowed: "
            f"{', '.join(allowed)}"
        )
    if word in by_scope:
        return dict.fromkeys(by_scope[word], 1.0)
    weights = {name: weight for name, weight in prediction.items() if isinstance(weight, float | int)}
    by_text = model.context.prediction.weighting is not None and not fixed
    if len(weights) < len(prediction) or by_text:
        hint = ", or one weight for all texts, --alpha NUMBER" if by_text else ""
        raise InputError(
            f"--part {word}: method {method} weights its adapters per text or token; allowed: "
            f"{', '.join(by_scope)}{hint}"
        )
    return {name: weight for name, weight in weights.items() if weight != 0}


def _head_of(model: PersonalModel, word: str, mix: dict[str, float]) -> WhichHead:
    """Return the head trained on this adapter alone, or the silo's head where the method has no such head."""
    parts, prediction = model.context.parts, model.context.prediction
    if word in ("mixed", "merged"):
        return prediction.head
    for name in (f"{HEAD}_{part}" for part in mix):
        if name in parts and isinstance(parts[name].module, Head):
            return name
    return prediction.head
