"""`build_model`: a run's `TrainingContext`, of backbone, method, tuner, initial adapter and activation cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from silotune.config import Config
from silotune.data.tasks import Task
from silotune.methods import Method
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.activation_cache import ActivationCache
from silotune.runs.build.initial_adapter import read_start
from silotune.runs.build.resolve import BackboneRequirements
from silotune.runs.build.validation import check_backbone
from silotune.training.at_once import rows_scored, rows_written, tokens_at_once
from silotune.training.context import TrainingContext


def build_model(
    config: Config,
    method: Method,
    tasks: Iterable[Task],
    backbone: Backbone | None = None,
    load: Callable[[BackboneRequirements], Backbone] = BackboneRequirements.load,
) -> TrainingContext:
    """Put a method on its backbone.

    Args:
        config: the run's configuration, with the precision resolved.
        method: the configured method, from `make_method`.
        tasks: the tasks that its head will answer.
        backbone: one already loaded; None: it is loaded.
        load: loads it.

    Raises:
        InputError: for a backbone, a head or an initial adapter that do not fit together.
    """
    if backbone is None:
        backbone = load(BackboneRequirements.of(config, method))
    check_backbone(config, method, backbone)
    tuner, head = method.setting.tuner, method.setting.head
    head.check(backbone, {task.name: task for task in tasks}.values())
    start = None if config.start is None else read_start(config.start, backbone, tuner)
    cache = None if config.cache.name == "none" else ActivationCache.for_tuner(backbone, tuner, config.cache.mib)
    return TrainingContext(
        backbone,
        method,
        config.train,
        config.seed,
        start,
        cache,
        tokens_at_once=tokens_at_once(config.train, backbone),
        rows_scored=rows_scored(config, backbone),
        rows_written=rows_written(config, backbone, head),
        rounds=config.rounds,
    )
