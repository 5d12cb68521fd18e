"""Refuse data and heads that do not fit a method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from silotune.config import Config, registries
from silotune.data.backdoor import check_attack
from silotune.data.kinds import KINDS
from silotune.data.tasks import Task, lower_is_better
from silotune.errors import InputError, require_known
from silotune.methods import Method
from silotune.methods.parts import Scope, Table, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.stored_model import is_causal
from silotune.models.heads import HEADS, Head, LanguageModelHead, LossRecipe
from silotune.models.tuners import TUNERS, Tuner, tuner_of


def check_tasks(
    config: Config,
    method: Method,
    tasks: Mapping[str, Task],
    absent: Mapping[str, Task] = MappingProxyType({}),
    labeled: Task | None = None,
) -> None:
    """Refuse tasks that the method, the head, the sampling or the evaluation does not support.

    `absent` are tasks of silos that `evaluation` keeps out of training, `labeled` is that of the coordinator's rows.
    """
    _check_meanings(tasks, labeled)
    _check_directions(tasks)
    sampling = config.sampling
    if sampling.count is not None and not method.centralized:
        for name, size in Counter(task.name if sampling.per_task else "" for task in tasks.values()).items():
            if sampling.count > size:
                of_task = f" of task {name!r}" if sampling.per_task else ""
                raise InputError(f"sampling.count: {sampling.count} silos a round, but there are only {size}{of_task}")
    head = method.setting.head
    if head.long_texts.reads != "cut" and not head.reads_windows:
        heads = "|".join(sorted(name for name, other in HEADS.items() if other.reads_windows))
        raise InputError(
            f"data.long_texts={head.long_texts.reads}: head={config.head.name} cuts texts that do not fit; allowed: "
            f"cut, or head={heads}"
        )
    if head.long_texts.in_windows and config.cache.name != "none":
        raise InputError(f"cache={config.cache.name}: keeps no windows (data.long_texts=windows); allowed: none")
    for silo, task in tasks.items():
        if not head.answers(task.kind):
            fitting = sorted(
                name for name, other in HEADS.items() if other.answers(task.kind) and not other.reads_reference
            )
            rows = task.rules.rows
            raise InputError(f"head={config.head.name}: silo {silo!r} holds {rows}; allowed: {', '.join(fitting)}")
        if method.kinds is not None and task.kind not in method.kinds:
            allowed = ", ".join(KINDS[kind].rows for kind in method.kinds)
            raise InputError(f"method={method.name}: silo {silo!r} holds {task.rules.rows}; allowed: {allowed}")
        if task.labeled and not task.rules.one_label:
            _check_without_classes(config, method, silo, task)
    if config.attack.name != "none":
        check_attack(config.attack, tasks)
    _check_head(config, method, tasks)
    if method.options.head_rounds > config.rounds > 0:
        raise InputError(
            f"method.head_rounds: {method.options.head_rounds} rounds of heads in a run of {config.rounds}; allowed: "
            f"0 to {config.rounds} (rounds)"
        )
    if config.train.early_stopping is not None and any(phase.when == "end" for phase in method.local_phases()):
        raise InputError(
            f"train.early_stopping: method {method.name} is finished by its last phase, so no earlier round is judged; "
            "leave it out"
        )
    _check_evaluation(config, method, tasks, absent)


def _check_without_classes(config: Config, method: Method, silo: str, task: Task) -> None:
    """Refuse settings that need one label per row if a silo's rows have numbers or several labels."""
    rows = f"silo {silo!r} holds {task.rules.rows}"
    if method.needs_labeled_rows:
        raise InputError(
            f"method={method.name}: the coordinator trains on rows of one label each, and {rows}; allowed: methods "
            "that train in the silos alone, such as fedavg or fedmcp"
        )
    recipe = LossRecipe(config.train.label_smoothing, config.train.class_weights)
    if not recipe.plain:
        raise InputError(f"{recipe.key}: is about rows of one label each, and {rows}; leave it out")


def check_labels(config: Config, tasks: Iterable[Task]) -> None:
    """Refuse `train.class_weights` of labels that none of the run's tasks has."""
    labels = {label for task in tasks for label in task.labels}
    weights = config.train.class_weights
    for label in weights if isinstance(weights, dict) else ():
        require_known("label in train.class_weights", label, labels)


def _check_head(config: Config, method: Method, tasks: Mapping[str, Task]) -> None:
    """Refuse `{soft}` in a template if the tuner has no soft prompt, and shared heads that method or tasks exclude."""
    head = method.setting.head
    if head.soft_slot and not method.setting.tuner.soft_prompt:
        allowed = ", ".join(sorted(name for name, tuner in TUNERS.items() if tuner.soft_prompt))
        raise InputError(
            f"head.template: {{soft}} is a place for a soft prompt; tuner={config.tuner.name} has none; "
            f"allowed: {allowed}"
        )
    parts = method.parts()
    names = sorted({task.name for task in tasks.values()})
    shared_parts = names_with(parts, Scope.SHARED)
    if config.head.scope == "shared" and shared_parts and not shares_head(method):
        raise InputError(f"head.scope=shared: method {method.name} keeps its heads in the silos; allowed: private")
    if any(isinstance(parts[name].module, Table) for name in shared_parts) and len(names) > 1:
        raise InputError(
            f"method={method.name}: shares a table by label, so that it needs one task in all silos, found "
            f"{', '.join(names)}; allowed: silos of one task (data.task)"
        )
    if shares_head(method) and head.has_tensors and len(names) > 1:
        remedy = (
            "give the silos one task, or use head.scope=private"
            if config.head.scope == "shared"
            else f"method={method.name} shares its head"
        )
        raise InputError(f"head.scope: a shared head needs one task in all silos, found {', '.join(names)}; {remedy}")


def shares_head(method: Method) -> bool:
    """Return whether a head is among the method's shared parts."""
    parts = method.parts()
    return any(isinstance(parts[name].module, Head) for name in names_with(parts, Scope.SHARED))


def _check_meanings(tasks: Mapping[str, Task], labeled: Task | None) -> None:
    """Refuse two silos whose tasks have one name but other labels: a model knows labels by their indices alone."""
    first: dict[str, str] = {}
    for silo, task in tasks.items():
        other = first.setdefault(task.name, silo)
        if tasks[other] != task:
            raise InputError(
                f"silo {silo!r}: its task {task.name!r} is {_meaning(task)}, that of silo "
                f"{other!r} is {_meaning(tasks[other])}; one name has to mean one task"
            )
    if labeled is not None and labeled not in tasks.values():
        silo, task = next(iter(tasks.items()))
        raise InputError(
            f"federation.labelled: the task of its rows is {labeled.name!r}, {_meaning(labeled)}; that of "
            f"silo {silo!r} is {task.name!r}, {_meaning(task)}"
        )


def _check_directions(tasks: Mapping[str, Task]) -> None:
    """Refuse metrics of which some are better when lower and others when higher: their mean says nothing."""
    of_loss = [silo for silo, task in tasks.items() if lower_is_better(task.metric)]
    others = [silo for silo, task in tasks.items() if not lower_is_better(task.metric)]
    if of_loss and others:
        raise InputError(
            f"metric: silo {of_loss[0]!r} is judged by {tasks[of_loss[0]].metric} and silo {others[0]!r} by "
            f"{tasks[others[0]].metric}; either all silos are judged by metrics that are better when lower, or none"
        )


def _meaning(task: Task) -> str:
    positive = f" of {task.positive}" if task.positive else ""
    return f"{task.kind} by {task.metric}{positive}" + (f" into {', '.join(task.labels)}" if task.labels else "")


def _check_evaluation(config: Config, method: Method, tasks: Mapping[str, Task], absent: Mapping[str, Task]) -> None:
    """Refuse an evaluation on tasks that a silo's head cannot answer."""
    evaluation, head = config.evaluation, method.setting.head
    names = {task.name for task in [*tasks.values(), *absent.values()]}
    if (evaluation.test_time or absent) and head.has_tensors and len(names) > 1:
        raise InputError(
            f"evaluation: a silo's head={config.head.name} knows its own task alone, and there are {len(names)}; "
            "allowed: head=lm or verbalizer, or silos of one task (data.task)"
        )
    for silo, task in absent.items():
        if not head.answers(task.kind):
            raise InputError(f"head={config.head.name}: cannot answer {silo!r} of evaluation; leave it out")
    if evaluation.new_silos and method.prediction().weighting is None:
        raise InputError(
            f"evaluation.new_silos: method {method.name} does not compare texts with silos' rows; allowed: feddpa-f, "
            "feddpa-t with method.weighting=dynamic"
        )


def check_start(config: Config, method: Method) -> None:
    """Refuse parts that the coordinator redraws every round if their start is part of the backbone's weights (PiSSA).

    A `start` that is cut for silos of a smaller rank is refused too: no product contains the removed ranks.
    """
    for part in method.parts().values():
        tuner = tuner_of(part.module)
        if part.redrawn and tuner is not None and tuner.starts_in_weights:
            raise InputError(
                f"tuner.init=pissa: method {method.name} draws the adapter anew after every round, and adds up its "
                "products; allowed: uniform, orthogonal"
            )
        if part.redrawn and config.start is not None and tuner is not None and tuner.ranks:
            raise InputError(
                f"start: method {method.name} adds up whole products, and silos of a smaller rank would receive a part "
                "of the start's; allowed: without tuner.ranks"
            )


def check_representation(method: Method, backbone: Backbone) -> None:
    """Refuse to compare texts by the first token of a causal model, which has seen no other."""
    if getattr(method.options, "representation", None) == "first" and is_causal(backbone.base.config):
        raise InputError("method.representation=first: the backbone's first token has seen no other; allowed: mean")
    projection = getattr(method, "projection", None)
    if projection is not None and projection.pooling == "first" and is_causal(backbone.base.config):
        raise InputError(
            f"method={method.name}: compares the first token's states, which have seen no other here; allowed: "
            "head=linear or mlp, whose pooling it takes"
        )


def check_kept_optimizers(config: Config, method: Method) -> None:
    """Refuse `train.keep_optimizer` where rounds begin with new tensors, for which kept moments mean nothing."""
    if not config.train.keep_optimizer:
        return
    aggregation = config.aggregation.name
    turns = getattr(registries.AGGREGATIONS.get(aggregation), "turns_factors", False)
    changed = f"aggregation={aggregation}" if turns else ""
    if any(part.redrawn for part in method.parts().values()):
        changed = f"method {method.name}"
    if changed:
        raise InputError(
            f"train.keep_optimizer: {changed} begins every round with new factors, and the moments of the old ones do "
            "not fit them; allowed: false"
        )


def check_backbone(config: Config, method: Method, backbone: Backbone) -> None:
    """Refuse a given backbone that was loaded with other settings than the configuration's."""
    if backbone.precision != config.precision.name or (
        method.setting.tuner.trains_backbone and not backbone.keep_master
    ):
        raise InputError(
            f"backbone: the one given runs in {backbone.precision}, the configuration wants {config.precision.name}"
            + (" with float32 weights (tuner trains them)" if method.setting.tuner.trains_backbone else "")
        )
    if backbone.quantization != config.backbone.quantization:
        raise InputError(
            f"backbone: the one given is stored with quantization={backbone.quantization}, the configuration wants "
            f"{config.backbone.quantization}"
        )


def check_lengths(config: Config, method: Method, backbone: Backbone) -> None:
    """Refuse texts, or answers, that are longer than the backbone reads."""
    length, tuner, head = config.train.max_length, method.setting.tuner, method.setting.head
    check_length("train.max_length", length, tuner, backbone)
    if backbone.max_tokens is None or not isinstance(head, LanguageModelHead):
        return
    new, room = head.generation.max_new_tokens, head.prompt_room(length)
    allowed = backbone.max_tokens - tuner.virtual_tokens - room + 1  # the model does not read the last token
    # in an encoder–decoder, the prompt takes none of the decoder's positions
    if new > allowed and not backbone.base.config.is_encoder_decoder:
        raise InputError(
            f"head.max_new_tokens: {new} behind a prompt of up to {room} tokens (train.max_length) are more than the "
            f"backbone reads; allowed: up to {allowed}"
        )


def check_length(key: str, length: int, tuner: Tuner, backbone: Backbone) -> None:
    """Refuse texts longer than the backbone reads beside the tuner's virtual tokens."""
    virtual = tuner.virtual_tokens
    if backbone.max_tokens is not None and length + virtual > backbone.max_tokens:
        beside = f" beside {virtual} virtual tokens (tuner.tokens)" if virtual else ""
        raise InputError(
            f"{key}: {length} is more than the backbone reads{beside}; allowed: up to {backbone.max_tokens - virtual}"
        )
