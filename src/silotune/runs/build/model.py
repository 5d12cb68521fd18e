"""Load a run's backbone and put the method on it, with the parts that the key `start` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from silotune.aggregation import RECEIVED_LOSS, score_read_by
from silotune.config import BackboneConfig, Config
from silotune.data.rows import SiloData
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.methods import Method
from silotune.methods.validation import check_method
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import resolve_device
from silotune.models.backbone.loading import load_backbone
from silotune.models.backbone.quantization import NONE, resolve_quantization
from silotune.models.backbone.stored_model import ModelClass
from silotune.models.forward.activation_cache import ActivationCache
from silotune.models.tuners import TUNERS
from silotune.runs.build import validation
from silotune.runs.build.resolve import chosen_precision, resolve
from silotune.runs.build.start import read_start
from silotune.training.at_once import rows_scored, rows_written, tokens_at_once
from silotune.training.context import TrainingContext


@dataclass(frozen=True)
class BackboneRequirements:
    """A run's requirements of its backbone; runs with equal requirements can share one."""

    backbone: BackboneConfig
    precision: str
    device: str
    keep_master: bool
    model_class: ModelClass
    checkpointing: bool

    @classmethod
    def of(cls, config: Config, method: Method) -> BackboneRequirements:
        """Return the requirements of a configuration and its method."""
        tuner, head = method.setting.tuner, method.setting.head
        quantization = resolve_quantization(config.backbone.quantization, resolve_device(config.device))
        if tuner.trains_backbone and quantization != NONE:
            others = ", ".join(name for name, kind in TUNERS.items() if not kind.trains_backbone)
            raise InputError(
                f"tuner={tuner.name}: trains the weights that backbone.quantization={quantization} rounds; allowed: "
                f"backbone.quantization=none, or the tuners {others}"
            )
        if tuner.trains_backbone and config.backbone.device_map is not None:
            raise InputError(
                f"tuner={tuner.name}: trains the weights that backbone.device_map spreads over devices; leave the key "
                "out, or choose another tuner"
            )
        return cls(
            config.backbone,
            chosen_precision(config),
            config.device,
            tuner.trains_backbone,
            head.model_class,
            config.train.gradient_checkpointing,
        )

    def load(self, on_use: bool = False) -> Backbone:
        """Load the backbone; arguments as for `load_backbone`."""
        return load_backbone(
            self.backbone,
            precision=self.precision,
            device=self.device,
            keep_master=self.keep_master,
            checkpointing=self.checkpointing,
            model_class=self.model_class,
            on_use=on_use,
        )


def build_model(
    config: Config,
    method: Method,
    tasks: Iterable[Task],
    backbone: Backbone | None = None,
    load: Callable[[BackboneRequirements], Backbone] = BackboneRequirements.load,
) -> TrainingContext:
    """Put a method on its backbone, and check that it can train on these tasks; `config` has its precision resolved."""
    backbone = run_backbone(config, method, backbone, load)
    validation.check_lengths(config, method, backbone)
    context = make_context(config, method, tasks, backbone)
    check_method(method)
    validation.check_start(config, method)
    validation.check_representation(method, backbone)
    validation.check_kept_optimizers(config, method)
    method.setting.head.check_loss(context.recipe)
    return context


def model_for(
    config: Config, silos: Iterable[SiloData], backbone: Backbone | None = None
) -> tuple[Config, TrainingContext]:
    """Build the model for reading these silos' rows without training; return the resolved configuration, too."""
    silos = list(silos)
    config, method = resolve(config, silos, backbone)
    tasks = {silo.name: silo.task for silo in silos}
    method.setting.head.check_names(tasks.values())
    validation.check_tasks(config, method, tasks)
    return config, build_model(config, method, tasks.values(), backbone)


def run_backbone(
    config: Config,
    method: Method,
    backbone: Backbone | None = None,
    load: Callable[[BackboneRequirements], Backbone] = BackboneRequirements.load,
) -> Backbone:
    """Load a run's backbone, or check the given one; from here on this process computes with the run's threads."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if backbone is None:
        return load(BackboneRequirements.of(config, method))
    validation.check_backbone(config, method, backbone)
    return backbone


def make_context(config: Config, method: Method, tasks: Iterable[Task], backbone: Backbone) -> TrainingContext:
    """Put a method on its backbone; for training call `build_model`, which also checks the configuration."""
    tuner, head, tasks = method.setting.tuner, method.setting.head, {task.name: task for task in tasks}.values()
    head.check(backbone, tasks)
    start = read_start(config, method, tasks, backbone)
    cache = None if config.cache.name == "none" else ActivationCache.for_tuner(backbone, tuner, config.cache.mib)
    return TrainingContext(
        backbone,
        method,
        config.train,
        config.seed,
        start,
        cache,
        tokens_at_once=tokens_at_once(config.train, backbone, method),
        rows_scored=rows_scored(config, backbone),
        rows_written=rows_written(config, backbone, head),
        rounds=config.rounds,
        measures=score_read_by(config.aggregation.name) == RECEIVED_LOSS,
    )
