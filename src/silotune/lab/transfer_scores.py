"""`exchange` scores runs' tuned parts in other runs' models; `Matrix` of absolute and relative scores (FedFAME, 5.4.2).

"The delta parameters of PLM trained on one dataset are transferred to all other datasets": every part that a source's
prediction mixes takes the place of the target's; nothing is trained. The head is the target's own, so that tasks with
other labels can be compared, or the source's, where label counts agree. Relative performance is the transferred score
over the target's own, in percent; a row of the matrix is a source, a column a target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from silotune.core.numeric import mean_ignoring_none
from silotune.core.tensors import State, Tensors
from silotune.data.metrics import LOSS_METRICS
from silotune.data.scores import constant_score
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.predict import score
from silotune.methods.head_mix import heads_of
from silotune.models.forward.mixing import parts_in

if TYPE_CHECKING:
    from silotune.training.federation import Federation


WhoseHead = Literal["target", "source"]


SENTIMENT, INFERENCE, PARAPHRASE = "sentiment analysis", "natural language inference", "paraphrase identification"

TASK_TYPES: Mapping[str, str] = {
    "SST-2": SENTIMENT,
    "RTE": INFERENCE,
    "QNLI": INFERENCE,
    "MNLI": INFERENCE,
    "MRPC": PARAPHRASE,
    "QQP": PARAPHRASE,
    "CoLA": "acceptability",
}
"""The types of GLUE's tasks, as in the paper's Table 1 (CoLA is not among its six)."""

OTHER = "other"


@dataclass(frozen=True)
class TransferModel:
    """A finished run that has one model for one task.

    Args:
        name: its name in messages.
        federation: the run's federation, whose method, backbone and head predict.
        task: the task of the run.
        seed: the seed of the run.
        state: the parts at the best round.
        tests: its sets of test rows; a score is the mean over them.
        reported: the test score in the run's summary.
    """

    name: str
    federation: Federation
    task: Task
    seed: int
    state: State
    tests: tuple[TokenizedRows, ...]
    reported: float

    @property
    def tuned(self) -> tuple[str, ...]:
        """Names of the parts that its prediction mixes."""
        return tuple(parts_in(self.federation.context.method.prediction().mix))

    @property
    def heads(self) -> list[str]:
        """Names of the parts that are the prediction's head."""
        return heads_of(self.federation.context.method.prediction().head)

    def judge(self, state: State) -> float:
        """Return the score of a state on the model's test rows, in percent."""
        average = mean_ignoring_none(score(self.federation.context, state, rows) for rows in self.tests)
        assert average is not None, "a run without test rows has no score to be compared with"
        return average

    def majority(self) -> float | None:
        """Return the score of the best constant answer to its test rows; None without labels, or by loss."""
        if not self.task.labeled or self.task.metric in LOSS_METRICS:
            return None
        return mean_ignoring_none(constant_score(self.task, rows.labels) for rows in self.tests)


@dataclass(frozen=True)
class TransferScore:
    """The score of one source on one target, in percent. `relative` is None if the target's own score is 0."""

    source: str
    target: str
    seed: int
    metric: str
    absolute: float
    relative: float | None


def exchange(models: Sequence[TransferModel], head: WhoseHead = "target") -> Iterator[TransferScore]:
    """Score every model's tuned parts on every task of the same seed, its own task first; yields one score at a time.

    Args:
        models: one per task and seed, of one method and tuner.
        head: whose head reads the labels. With the source's, pairs of different label counts have no score.
    """
    references: dict[str, float] = {}
    for target in models:
        sources = [source for source in models if source.seed == target.seed]
        for source in sorted(sources, key=lambda model: model is not target):  # its own comes first
            if head == "source" and (source.task.kind, source.task.outputs) != (target.task.kind, target.task.outputs):
                continue
            absolute = target.judge(transferred(source, target, head))
            if source is target:
                references[target.name] = absolute
            reference = references[target.name]
            relative = 100 * absolute / reference if reference else None
            yield TransferScore(source.task.name, target.task.name, target.seed, target.task.metric, absolute, relative)


def transferred(source: TransferModel, target: TransferModel, head: WhoseHead = "target") -> State:
    """Replace the target's tuned parts by the source's, and its head too if `head` asks for the source's."""
    check_alike(source, target)
    state = target.state | {name: source.state[name] for name in source.tuned}
    if head == "target":
        return state
    if not any(source.state.get(name) for name in source.heads):
        raise InputError(
            f"transfer.head=source: {source.name} reads labels with the backbone's own vocabulary; allowed: target"
        )
    before, after = f"{source.task.name}.", f"{target.task.name}."  # a head's tensors begin with its task's name

    def renamed(tensors: Tensors) -> Tensors:
        return {after + key.removeprefix(before): each for key, each in tensors.items() if key.startswith(before)}

    return state | {name: renamed(source.state.get(name, {})) for name in source.heads}


def check_alike(first: TransferModel, second: TransferModel) -> None:
    """Refuse two runs whose tuned parts cannot take each other's place."""
    shapes = [
        {
            f"{part}/{name}": tuple(tensor.shape)
            for part in model.tuned
            for name, tensor in model.state.get(part, {}).items()
        }
        for model in (first, second)
    ]
    differing = sorted(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
    if differing:
        expected, actual = (by_name.get(differing[0], "absent") for by_name in shapes)
        raise InputError(
            f"{second.name}: its tuned parts are not those of {first.name} "
            f"({differing[0]}: {actual} instead of {expected}); "
            "transfer takes runs with the same tuner and options"
        )


@dataclass(frozen=True)
class Matrix:
    """The scores of one method, as means over seeds.

    Args:
        label: the method's label.
        tasks: rows (sources) and columns (targets), grouped by type.
        types: each task's type.
        absolute: (source, target) → score in percent; pairs that have no score are absent.
        relative: the same in percent of the target's own score.
        seeds: the number of seeds.
    """

    label: str
    tasks: tuple[str, ...]
    types: tuple[str, ...]
    absolute: Mapping[tuple[str, str], float]
    relative: Mapping[tuple[str, str], float]
    seeds: int

    def mean(self, alike: bool | None = None) -> float | None:
        """The mean relative score between two tasks: of the same type, of different types, or (None) of any.

        Pairs with a task of unknown type (`OTHER`) count only among any.
        """
        types = dict(zip(self.tasks, self.types, strict=True))

        def counts(source: str, target: str) -> bool:
            kinds = types[source], types[target]
            return alike is None or (OTHER not in kinds and alike == (kinds[0] == kinds[1]))

        return mean_ignoring_none(value for (s, t), value in self.relative.items() if s != t and counts(s, t))

    def asymmetry(self) -> float | None:
        """The mean of |A on B − B on A| over pairs of tasks, in points of relative score."""
        scores = self.relative
        gaps = [abs(value - scores[t, s]) for (s, t), value in scores.items() if s < t and (t, s) in scores]
        return mean_ignoring_none(gaps)


def matrix(label: str, scores: Sequence[TransferScore], types: Mapping[str, str] = TASK_TYPES) -> Matrix:
    """Make the matrix of one method's scores; tasks are in the order of `types`, unknown tasks last."""
    names = list(dict.fromkeys(one.target for one in scores))
    kinds = {name: types.get(name, OTHER) for name in names}
    order = list(dict.fromkeys([*types.values(), OTHER]))
    known = list(types)
    tasks = sorted(names, key=lambda name: (order.index(kinds[name]), known.index(name) if name in known else 0))
    absolute: dict[tuple[str, str], list[float]] = {}
    relative: dict[tuple[str, str], list[float]] = {}
    for one in scores:
        absolute.setdefault((one.source, one.target), []).append(one.absolute)
        if one.relative is not None:
            relative.setdefault((one.source, one.target), []).append(one.relative)
    return Matrix(
        label,
        tuple(tasks),
        tuple(kinds[name] for name in tasks),
        {pair: math.fsum(values) / len(values) for pair, values in absolute.items()},
        {pair: math.fsum(values) / len(values) for pair, values in relative.items()},
        len({one.seed for one in scores}),
    )
