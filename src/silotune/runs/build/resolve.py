"""Read a configuration, fill in all defaults, and resolve `auto` for this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar, Unpack, cast

import torch
from pydantic import BaseModel, ValidationError

from silotune.communication.privacy.accountant import usual_delta
from silotune.communication.privacy.plan import proposed, step_plans
from silotune.config import Choice, Config, input_error, load_config
from silotune.config.head import PLAIN
from silotune.config.keys import Keys
from silotune.config.trees import merged
from silotune.data.long_texts import LongTexts
from silotune.data.rows import SiloData
from silotune.data.templates import CHAT
from silotune.errors import InputError, require_known
from silotune.methods import METHODS, Method, Setting
from silotune.methods.parts import Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.device import resolve_device, resolve_precision
from silotune.models.backbone.quantization import resolve_quantization
from silotune.models.backbone.stored_model import has_chat_template, pooling_of
from silotune.models.heads import HEADS
from silotune.models.heads.classifier import POOLED
from silotune.models.tuners import TUNERS


def with_silo_ranks(config: Config) -> Config:
    """Move the ranks that entries of `silos` set to `tuner.ranks`, overriding its values."""
    ranks = {silo.name: silo.rank for silo in config.silos if silo.rank is not None}
    if not ranks:
        return config
    return with_ranks(config.replace(silos=[silo.replace(rank=None) for silo in config.silos]), ranks)


def with_ranks(config: Config, ranks: Mapping[str, int]) -> Config:
    """Return the configuration with these values in `tuner.ranks`."""
    if "ranks" not in TUNERS.find(config.tuner.name).Options.model_fields:
        able = ", ".join(name for name, tuner in TUNERS.items() if "ranks" in tuner.Options.model_fields)
        raise InputError(f"silos.{next(iter(ranks))}.rank: tuner={config.tuner.name} has no rank; allowed: {able}")
    return config.replace(tuner={"ranks": {**(config.tuner.options.get("ranks") or {}), **ranks}})


def for_silo(config: Config, silo: str, most: int | None) -> tuple[Config, int | None]:
    """Return the configuration of a run for one silo alone: `tuner.ranks` has this silo only, at most its own bound.

    Also return the silo's rank, if the bound is what lowers it.
    """
    tuner = make_method(config).setting.tuner
    if tuner.rank is None:
        return config, None
    planned = tuner.ranks.get(silo, tuner.rank)
    rank = min(planned, most or planned)
    config = config.replace(tuner={"ranks": {} if rank == tuner.rank else {silo: rank}})
    return config, rank if rank < planned else None


def check_ranks(method: Method, silos: Collection[str]) -> None:
    """Refuse ranks of silos that there are not, and those of a method that puts all silos' rows into one place."""
    ranks = method.setting.tuner.ranks
    for silo in ranks:
        require_known("silo in tuner.ranks", silo, silos)
    if ranks and method.centralized:
        raise InputError(f"tuner.ranks: method {method.name} trains one adapter on all silos' rows; leave it out")


Options = TypeVar("Options", bound=BaseModel)


def read_config(
    source: str | Config, overrides: Sequence[str] | None = None, changes: Sequence[str] = (), **keys: Unpack[Keys]
) -> Config:
    """Return the configuration of a preset or file, with method and tuner options filled in; see `load_config`.

    Args:
        source: a preset's name or the path of a YAML file; or a `Config`, whose keys are to another method what a
            preset's are.
        overrides: `key=value` words, dotted keys.
        changes: words that override all others.
        keys: as `overrides`: `rounds=2`, or a group of keys as a dictionary: `train={"lr": 1e-3}`.
    """
    values = cast("Mapping[str, object]", keys)
    config = load_config(keys_of(source), overrides or [], changes, values)
    config = with_silo_ranks(config)
    method = make_method(config)
    _check_defined(method, "aggregation", config.aggregation.name, method.aggregations)
    _check_defined(method, "train.optimizer", config.train.optimizer, method.optimizers)
    return with_plan(with_options(config, method), method)


def with_plan(config: Config, method: Method) -> Config:
    """Return the configuration with the rate and the δ of `privacy.plan=auto`, where they are not given."""
    privacy = config.privacy
    if privacy.plan is None or privacy.rate is not None:
        return config
    assert privacy.units is not None, "the section refuses less"
    assert privacy.epsilon is not None, "the section refuses less"
    if config.train.steps is None:
        raise InputError("privacy.plan: passes over rows make no known number of steps; give train.steps")
    delta, phases = privacy.delta or usual_delta(privacy.units), method.local_phases()
    rounds = sum(phase.runs_in(number) for phase in phases if phase.trains for number in range(1, config.rounds + 1))
    plan = proposed(step_plans(privacy.epsilon, delta, steps=[max(1, rounds * config.train.steps)]))
    return config.replace(privacy={"rate": plan.rate, "delta": delta})


def _check_defined(method: type[Method] | Method, key: str, name: str, allowed: Collection[str] | None) -> None:
    """Refuse a choice that a method is not defined for; None allows all."""
    if allowed is not None and name not in allowed:
        names = ", ".join(sorted(allowed))
        raise InputError(f"{key}={name}: method {method.name} is not defined for it; allowed: {names}")


def with_options(config: Config, method: Method) -> Config:
    """Return the configuration with all options of its method and of the method's tuner filled in."""
    tuner = method.setting.tuner
    return config.replace(
        method=Choice(name=config.method.name, **method.options.model_dump(mode="json")),
        tuner=Choice(name=config.tuner.name, **tuner.options.model_dump(mode="json")),
    )


def keys_of(source: str | Config) -> str | dict[str, object]:
    """Return the keys that a `Config` was given, for `load_config`; the name of a preset or file as it is."""
    if isinstance(source, str):
        return source
    keys = merged([source.model_dump(exclude_defaults=True), source.model_dump(exclude_unset=True)])
    return keys | {"method": source.method.model_dump()}


class Resolved(NamedTuple):
    """A run's configuration as it takes place on this machine, and its method."""

    config: Config
    method: Method


def resolve(
    config: Config, silos: Iterable[SiloData] = (), backbone: Backbone | None = None, processes: int = 1
) -> Resolved:
    """Return what a run does here, in the one order that all engines, the parties of a federation and `restore` have.

    1. What the model decides: `head.pooling`, `head.template`.
    2. What this machine decides: threads (an equal share of the cores for each process), precision, quantization.
    3. The method; where rows are conversations, its head uses the chat template, which the configuration need not say.
    4. All options of the method and of its tuner.

    Keys of one silo come before (`local_config`, `for_silo`, `with_ranks`); what the loaded backbone decides
    (`train.tokens_at_once=auto`, `cohort=auto`) comes after, in `build`.

    Args:
        config: as `read_config` returns it, or as another party sent it.
        silos: the rows of the run, as far as they are here.
        backbone: the run's, if it is loaded already.
        processes: the number of those that share this machine's cores.
    """
    config = with_model_defaults(config, backbone)
    device = resolve_device(config.device)
    config = config.replace(
        threads=config.threads or max(1, torch.get_num_threads() // processes),
        precision={"name": chosen_precision(config)},
        backbone={"quantization": resolve_quantization(config.backbone.quantization, device)},
    )
    method = make_method(with_chat_template(config, silos))
    return Resolved(with_options(config, method), method)


def chosen_precision(config: Config) -> str:
    """Return the precision that `auto` means on this machine; noise on rows is in float32 on all."""
    name = config.precision.name
    if name == "auto" and config.privacy.unit is not None:
        return "fp32"
    return resolve_precision(name, resolve_device(config.device))


def with_model_defaults(config: Config, backbone: Backbone | None = None) -> Config:
    """Return the configuration with the pooling and the template that suit the model, where none is given.

    A model that cannot be read has the usual ones: an error that says why comes when it is loaded.
    """
    head, defaults = config.head, dict[str, str]()
    try:
        if head.pools and head.pooling == "auto":
            defaults["pooling"] = "first"
            defaults["pooling"] = pooling_of(config.backbone, backbone)
        if head.writes and head.template is None:
            defaults["template"] = PLAIN
            defaults["template"] = CHAT if has_chat_template(config.backbone, backbone) else PLAIN
    except (InputError, OSError, ValueError):
        pass
    return config.replace(head=defaults)


SUMS_ALONE = (
    "sums under masks (experimental, not reviewed from outside): aggregation.outlier and the error of averaging are "
    "off, as nobody sees a single update; scores choose no round, the last one counts"
)
"""Says which defaults do not fit `aggregation.secure`."""


def chosen_defaults(source: Config, config: Config) -> list[str]:
    """Return a line for each default that followed from the model or from other keys, for people."""
    lines = []
    if source.head.template is None and config.head.template is not None:
        plain = "“### Instruction: … ### Response:”, as the tokenizer has no chat template"
        words = "the model's own chat template" if config.head.template == CHAT else plain
        lines.append(f"prompts: {words} (head.template={config.head.template})")
    if source.head.pooling == "auto" != config.head.pooling:
        lines.append(f"classified by: {POOLED[config.head.pooling]} (head.pooling={config.head.pooling})")
    if config.aggregation.secure:
        lines.append(SUMS_ALONE)
    return lines


def with_chat_template(config: Config, data: Iterable[SiloData]) -> Config:
    """Return the configuration with the chat template as template, if rows are conversations and no text is given."""
    head = config.head
    if not head.writes or head.template not in (None, PLAIN):
        return config
    if any(row.turns for silo in data for row in silo.splits.train):
        return config.replace(head={"template": CHAT})
    return config


def make_method(config: Config) -> Method:
    """Return the configured method over the configured tuner and head."""
    method, tuner = METHODS.find(config.method.name), TUNERS.find(config.tuner.name)
    _check_defined(method, "tuner", tuner.name, method.tuners)
    setting = Setting(
        tuner=tuner(_options(tuner.Options, config.tuner, "tuner")),
        head=HEADS[config.head.name].make(config.head).with_long_texts(long_texts(config)),
        head_scope=Scope(config.head.scope),
    )
    return method(setting, _options(method.Options, config.method, "method"))


def long_texts(config: Config) -> LongTexts:
    """Return what becomes of texts that do not fit."""
    data = config.data
    return LongTexts(data.long_texts, data.window_overlap, data.windows_per_row)


def _options(model: type[Options], choice: Choice, prefix: str) -> Options:
    try:
        return model.model_validate(choice.options)
    except ValidationError as error:
        raise input_error(error, model, prefix) from None
