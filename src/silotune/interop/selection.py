"""`select`: which adapters, weights and head of a run an export holds (`ExportSelection`); merges a mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from silotune.core.tensors import State, Tensors, copy
from silotune.data.tasks import Task
from silotune.errors import InputError, unknown_name_error
from silotune.evaluation.federation_scores import current_model_state
from silotune.interop.fold_weights import can_fold
from silotune.methods.head_mix import WhichHead, head_tensors, heads_of
from silotune.methods.parts import HEAD, Part, Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import Mix, joined_tensors, members, parts_in, resolve_weights
from silotune.models.heads import Head
from silotune.models.tuners import TUNERS, Tuner, Weight, WeightedTensors, tuner_of
from silotune.models.tuners.base import MergedAdapter
from silotune.models.tuners.token_weight import TokenWeight
from silotune.runs.run_result import Run

WORDS = {"global": Scope.SHARED, "private": Scope.PRIVATE, "mixed": None, "merged": None}
"""Values of `--part`: an adapter by its scope, or the silo's whole model as one adapter or folded into the weights."""


@dataclass(frozen=True)
class ExportSelection:
    """Content of one export.

    Args:
        run: the finished run.
        silo: name of the silo.
        word: one of `WORDS`.
        mix: weights of the exported adapters by part name.
        adapter: the mix as one adapter.
        others: further changes of weights in the mix, with their tuners; weights alone can hold them.
        head: the head that is exported with them.
        head_part: name of the head's part; of a mix of heads, their weights by part name.
        head_tensors: the head's tensors, their names without the task's.
        task: the silo's task.
        private: exported parts that never left the silo.
        prediction: the mix with which the silo predicts.
    """

    run: Run
    silo: str
    word: str
    mix: dict[str, float]
    adapter: MergedAdapter
    others: tuple[tuple[Tuner, MergedAdapter], ...]
    head: Head
    head_part: str | dict[str, float]
    head_tensors: Tensors
    task: Task
    private: tuple[str, ...]
    prediction: dict[str, Weight | TokenWeight]

    @property
    def tuner(self) -> Tuner:
        """The tuner of all adapters of the run."""
        return self.run.federation.method.setting.tuner

    @property
    def per_text(self) -> bool:
        """Whether the silo weights its adapters for each text; `prediction` then holds the weights before that."""
        return self.run.federation.method.prediction().weighting is not None

    @property
    def whole(self) -> bool:
        """Whether the export predicts as the silo does."""
        return (
            not self.per_text
            and self.prediction == self.mix
            and heads_of(self.run.federation.method.prediction().head) == heads_of(self.head_part)
        )


def select(run: Run, silo: str, word: str) -> ExportSelection:
    """Select the content of an export from a run at its best round."""
    federation = run.federation
    owner = next((candidate for candidate in federation.silos.values() if silo in candidate.evaluations), None)
    if owner is None:
        raise unknown_name_error("silo", silo, run.silos)
    if word not in WORDS:
        raise unknown_name_error("part", word, WORDS)
    task = owner.evaluations[silo].test.task
    state, parts = current_model_state(federation, owner), federation.context.parts
    prediction = resolve_weights(federation.method.prediction().mix, state)
    mix, tuner = _mix(run, word, prediction), federation.method.setting.tuner
    by_tuner = _by_tuner(parts, mix)
    which = _head_of(run, word, mix)
    heads = heads_of(which)
    head = parts[heads[0]].module
    assert isinstance(head, Head), "found among the heads"
    names = [*parts_in(mix), *heads]
    return ExportSelection(
        run,
        silo,
        word,
        mix,
        merge(federation.backbone, tuner, state, by_tuner.pop(tuner)),
        tuple((other, merge(federation.backbone, other, state, weights)) for other, weights in by_tuner.items()),
        head,
        which if isinstance(which, str) else _numbers(which, state),
        _of_task(run, head, head_tensors(which, state), task),
        task,
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
    """Make one adapter of a mix of parts.

    Args:
        backbone: the backbone on which they were trained.
        tuner: the tuner of all parts.
        state: the parts' tensors.
        mix: part name → weight.
    """
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


def _mix(run: Run, word: str, prediction: dict[str, Weight | TokenWeight]) -> dict[str, float]:
    """Weights of the exported adapters by part name."""
    federation = run.federation
    parts, tuner, method = federation.context.parts, federation.method.setting.tuner, federation.config.method.name
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
    if others and word in WORDS and word != "merged":
        raise InputError(
            f"--part {word}: method {method} also changes the frozen weights ({', '.join(others)}), which no adapter "
            "holds; allowed: merged"
        )
    if word not in allowed:
        names = by_scope.get(word, [])
        scope = "shared" if word == "global" else "private"
        if names:
            why = f"method {method} has {len(names)} {scope} adapters ({', '.join(names)}), which work together"
        elif word in by_scope:
            why = f"method {method} has no {scope} adapter"
        elif word == "mixed":
            why = f"tuner {tuner.name} holds the weights themselves"
        else:
            foldable = ", ".join(name for name, kind in TUNERS.items() if can_fold(kind))
            why = f"tuner {tuner.name} cannot be folded into weights (that can be: {foldable})"
        raise InputError(f"--part {word}: {why}; allowed: {', '.join(allowed)}")
    if word in by_scope:
        return dict.fromkeys(by_scope[word], 1.0)
    weights = {name: weight for name, weight in prediction.items() if isinstance(weight, float | int)}
    if len(weights) < len(prediction) or federation.method.prediction().weighting is not None:
        raise InputError(
            f"--part {word}: method {method} weights its adapters per text or token; allowed: {', '.join(by_scope)}"
        )
    return {name: weight for name, weight in weights.items() if weight != 0}


def _head_of(run: Run, word: str, mix: dict[str, float]) -> WhichHead:
    """The part of the head trained on this adapter alone, or of the silo's head where the method has no such head."""
    parts, prediction = run.federation.context.parts, run.federation.method.prediction()
    if word in ("mixed", "merged"):
        return prediction.head
    for name in (f"{HEAD}_{part}" for part in mix):
        if name in parts and isinstance(parts[name].module, Head):
            return name
    return prediction.head


def _numbers(mix: Mix, state: State) -> dict[str, float]:
    """The weights of a mix of heads."""
    return {name: weight for name, weight in resolve_weights(mix, state).items() if isinstance(weight, float | int)}


def _of_task(run: Run, head: Head, tensors: Tensors, task: Task) -> Tensors:
    """The tensors of one task's head, their names without the task's."""
    names = head.init(run.federation.backbone, [task], torch.Generator().manual_seed(0))
    return {name.removeprefix(f"{task.name}."): tensors[name] for name in names}
