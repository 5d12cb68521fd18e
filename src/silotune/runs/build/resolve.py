"""`read_config` fills in defaults, `on_this_machine` what is `auto`; `make_method`; `BackboneRequirements`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import BaseModel, ValidationError

from silotune.config import BackboneConfig, Choice, Config, input_error, load_config
from silotune.config.head import HeadConfig
from silotune.data.tasks import SiloData
from silotune.data.templates import CHAT
from silotune.errors import InputError
from silotune.methods import METHODS, Method, Setting
from silotune.methods.parts import Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import resolve_device, resolve_precision
from silotune.models.backbone.loading import load_backbone
from silotune.models.backbone.quantization import NONE, resolve_quantization
from silotune.models.backbone.shared_weights import SharedWeights
from silotune.models.backbone.stored_model import ModelClass
from silotune.models.heads import HEADS
from silotune.models.tuners import TUNERS

Options = TypeVar("Options", bound=BaseModel)


class _MethodDefaults(Mapping[str, Mapping[str, object]]):
    """Method id → the settings it brings along, looked up when needed: a method may be registered at any time."""

    def __getitem__(self, name: str) -> Mapping[str, object]:
        return METHODS[name].defaults

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def __len__(self) -> int:
        return len(METHODS)


METHOD_DEFAULTS = _MethodDefaults()


def read_config(
    source: str, overrides: Sequence[str] | None = None, changes: Sequence[str] = (), **keys: object
) -> Config:
    """Return the configuration of a preset or file, with method and tuner options filled in; see `load_config`.

    Args:
        source: a preset's name or the path of a YAML file.
        overrides: `key=value` words, dotted keys.
        changes: words that override all others.
        keys: as `overrides`: `rounds=2`, or a group of keys as a dictionary: `train={"lr": 1e-3}`.

    Raises:
        InputError: for a bad key or value.
    """
    config = load_config(source, overrides or [], METHOD_DEFAULTS, changes, keys)
    method = make_method(config)
    tuner = method.setting.tuner
    return config.model_copy(
        update={
            "method": Choice(name=config.method.name, **method.options.resolved()),
            "tuner": Choice(name=config.tuner.name, **tuner.options.model_dump(mode="json")),
        }
    )


def on_this_machine(config: Config) -> Config:
    """Return the configuration with precision, quantization and threads resolved for this machine.

    Raises:
        InputError: this machine does not have the configured device.
    """
    threads = config.threads or torch.get_num_threads()
    device = resolve_device(config.device)
    precision = config.precision.model_copy(update={"name": resolve_precision(config.precision.name, device)})
    quantization = resolve_quantization(config.backbone.quantization, device)
    backbone = config.backbone.model_copy(update={"quantization": quantization})
    return config.model_copy(update={"backbone": backbone, "precision": precision, "threads": threads})


def use_this_machine(config: Config) -> Config:
    """Set the configured number of threads in this process; return the configuration as `on_this_machine`."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return on_this_machine(config)


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
        """Return the requirements of a configuration and its method.

        Raises:
            InputError: the tuner trains weights that are stored quantized or spread over devices.
        """
        tuner, head = method.setting.tuner, method.setting.head
        checkpointing = config.train.gradient_checkpointing
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
            config.precision.name,
            config.device,
            tuner.trains_backbone,
            head.model_class,
            checkpointing,
        )

    def load(self, on_use: bool = False, weights: SharedWeights | None = None) -> Backbone:
        """Load the backbone.

        Args:
            on_use: see `load_backbone`.
            weights: see `load_backbone`.

        Raises:
            InputError: as `load_backbone`.
        """
        return load_backbone(
            self.backbone,
            precision=self.precision,
            device=self.device,
            keep_master=self.keep_master,
            checkpointing=self.checkpointing,
            model_class=self.model_class,
            on_use=on_use,
            weights=weights,
        )


def with_chat_template(config: Config, data: Iterable[SiloData]) -> Config:
    """Return the configuration with the chat template as template, if none is given and rows are conversations.

    Raises:
        InputError: keys of the chat template are given, and no template or row needs it.
    """
    head = config.head
    if head.template is not None or head.name not in HeadConfig.owners["chat_kwargs"]:
        return config
    if any(row.turns for silo in data for row in silo.splits.train):
        return with_template(config, CHAT)
    if head.chat_keys:
        raise InputError(f"head.{head.chat_keys[0]}: of head.template=chat; give that too, or leave this out")
    return config


def with_template(config: Config, template: str) -> Config:
    """Return the configuration with another `head.template`."""
    return config.model_copy(update={"head": config.head.model_copy(update={"template": template})})


def make_method(config: Config) -> Method:
    """Return the configured method over the configured tuner and head.

    Raises:
        InputError: for an unknown method or tuner, or options they do not have.
    """
    method, tuner = METHODS.find(config.method.name), TUNERS.find(config.tuner.name)
    if method.tuners is not None and tuner.name not in method.tuners:
        allowed = ", ".join(sorted(method.tuners))
        raise InputError(f"tuner={tuner.name}: method {method.name} is not defined for it; allowed: {allowed}")
    setting = Setting(
        tuner=tuner(_options(tuner.Options, config.tuner, "tuner")),
        head=HEADS[config.head.name].make(config.head),
        head_scope=Scope(config.head.scope),
    )
    return method(setting, _options(method.Options, config.method, "method"))


def _options(model: type[Options], choice: Choice, prefix: str) -> Options:
    try:
        return model.model_validate(choice.options)
    except ValidationError as error:
        raise input_error(error, model, prefix) from None
