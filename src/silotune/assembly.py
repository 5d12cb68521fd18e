"""Puts a run together: configuration → backbone, method, silos, coordinator. Nothing here trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from pydantic import BaseModel, ValidationError

from silotune.aggregation import AGGREGATIONS, Aggregation, make_aggregation
from silotune.backbone import Backbone
from silotune.cohort import ALONE, Cohort, choose
from silotune.config import Choice, Config, input_error, load_config
from silotune.coordinator import Coordinator, silos_a_round
from silotune.data.batching import TokenisedRows
from silotune.data.labelled import labelled_rows, without_labels
from silotune.data.loading import load_absent, load_silos
from silotune.data.poison import Backdoor, check_attack, check_trigger, make_backdoor
from silotune.data.tasks import Row, SiloData, Task
from silotune.errors import InputError, unknown
from silotune.frozen_prefix import FrozenPrefix
from silotune.heads import HEADS, Head
from silotune.heads.base import Tokenise
from silotune.interop.start import read_start
from silotune.methods import METHODS, Method, Setting
from silotune.participant import Participant
from silotune.parts import Scope, names_with
from silotune.pretrained import load_backbone, resolve_precision
from silotune.privacy.budget import Privacy, make_privacy
from silotune.privacy.central import CentralNoise
from silotune.server_optimizers import ServerOptimizer
from silotune.silo import AttackedRows, Evaluation, Silo
from silotune.training import LocalTraining
from silotune.tuners import TUNERS
from silotune.uplink import NO_UPLINK, make_chain
from silotune.uplink.draws import read_secret

Options = TypeVar("Options", bound=BaseModel)

_ANY_LENGTH = 2**20  # tokens; no row is cut at this
METHOD_DEFAULTS: Mapping[str, Mapping[str, object]] = {name: method.defaults for name, method in METHODS.items()}


@dataclass
class Federation:
    """Everything a run needs."""

    config: Config
    backbone: Backbone
    method: Method
    silos: dict[str, Silo]
    training: LocalTraining
    coordinator: Coordinator
    tasks: Mapping[str, Task]
    """Silo name → its task, before a centralised method puts silos together."""
    texts: Mapping[str, int]
    """Silo name → how many texts a row has."""
    server: Silo | None = None
    """The coordinator's own labelled rows, where the method trains there."""
    central: Evaluation | None = None
    """The rows on which all silos are judged together, where one data set is partitioned."""
    malicious: tuple[str, ...] = ()
    """The silos that attack, in name order."""
    absent: Mapping[str, Silo] = field(default_factory=dict)
    """What `evaluation` keeps out of training, by name."""
    privacy: Privacy | None = None
    """What the run promises; None where nothing is noised, or nothing is sent."""
    cohort: Cohort = ALONE
    """How many silos train together, where one process trains several."""

    @property
    def rounds(self) -> int:
        """As configured, or as many as the privacy budget lasts for."""
        return self.config.rounds if self.privacy is None else self.privacy.rounds

    def participant(self) -> Participant:
        """A silo's side of the exchange, for any of the silos."""
        noised_in_silos = self.config.uplink.noise is not None
        promise = self.privacy if noised_in_silos else None
        return Participant(self.training, self.coordinator.expected, self.coordinator.uplink, promise)


def read_config(source: str, overrides: list[str] | None = None) -> Config:
    """The resolved configuration of a preset or file, with method and tuner options filled in.

    Raises:
        InputError: for a bad key or value.
    """
    config = load_config(source, overrides or [], METHOD_DEFAULTS)
    method = make_method(config)
    tuner = method.setting.tuner
    return config.model_copy(
        update={
            "method": Choice(name=config.method.name, **method.options.model_dump(mode="json")),
            "tuner": Choice(name=config.tuner.name, **tuner.options.model_dump(mode="json")),
        }
    )


def on_this_machine(config: Config) -> Config:
    """The configuration with what this machine decides where it is left open: precision and threads."""
    threads = config.threads or torch.get_num_threads()
    return config.model_copy(update={"precision": resolve_precision(config.precision), "threads": threads})


def make_method(config: Config) -> Method:
    """The configured method over the configured tuner and head.

    Raises:
        InputError: for an unknown method or tuner, or options they do not have.
    """
    if config.method.name not in METHODS:
        raise unknown("method", config.method.name, METHODS)
    if config.tuner.name not in TUNERS:
        raise unknown("tuner", config.tuner.name, TUNERS)
    method, tuner = METHODS[config.method.name], TUNERS[config.tuner.name]
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


def build(
    config: Config,
    backbone: Backbone | None = None,
    data: list[SiloData] | None = None,
    labelled: SiloData | None = None,
) -> Federation:
    """Load the backbone and the data (unless given), and make silos and coordinator.

    `labelled`: the coordinator's labelled rows, where they are its own; else they are drawn from the silos' rows.

    Raises:
        InputError: for anything that cannot work, before any training.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config = on_this_machine(config)
    method = make_method(config)
    kept_out: list[SiloData] = []
    if data is None:
        data, kept_out = load_silos(config), load_absent(config)
    check_data(config, method, data)
    _check_evaluation(config, method, data, kept_out)
    keep_master = method.setting.tuner.trains_backbone
    if backbone is None:
        model_class = method.setting.head.model_class
        backbone = load_backbone(
            config.backbone, precision=config.precision, keep_master=keep_master, model_class=model_class
        )
    if backbone.precision != config.precision or (keep_master and not backbone.keep_master):
        raise InputError(
            f"backbone: the one given runs in {backbone.precision}, the configuration wants {config.precision}"
            + (" with float32 weights (tuner trains them)" if keep_master else "")
        )
    length, virtual = config.train.max_length, method.setting.tuner.virtual_tokens
    if backbone.longest is not None and length + virtual > backbone.longest:
        beside = f" beside {virtual} virtual tokens (tuner.tokens)" if virtual else ""
        raise InputError(
            f"train.max_length: {length} is more than the backbone reads{beside}; allowed: up to "
            f"{backbone.longest - virtual}"
        )
    method.setting.head.check(backbone, {silo.task.name: silo.task for silo in [*data, *kept_out]}.values())
    tokenise = method.setting.head.tokeniser(backbone, config.train.max_length)
    rows = any(silo.splits.train for silo in data)  # a finished run is opened without
    if labelled is None and method.server_phases() and rows:
        labelled = labelled_rows(data, config.server, config.data_seed)
    backdoor = None if config.attack.name == "none" else _backdoor(config, data, method, backbone)
    silos = make_silos(data, tokenise, method, backdoor)
    absent = {item.name: next(iter(make_silos([item], tokenise, method).values())) for item in kept_out}
    start = None if config.start is None else read_start(config.start, backbone, method.setting.tuner)
    cache = None if config.cache.name == "none" else FrozenPrefix.over(backbone, method.setting.tuner, config.cache.mib)
    training = LocalTraining(backbone, method, config.train, config.seed, start, cache)
    server, shared = config.server, training.initial_shared(silos.values())
    groups = None if method.centralised else sampling_groups(config, data)
    communicates = any(shared.values())
    secret = read_secret(config.privacy.secret) if communicates else None
    coordinator = Coordinator(
        shared,
        _aggregation(config, _a_round(config, silos, groups), communicates),
        config.seed,
        fraction=config.sampling.fraction,
        count=config.sampling.count,
        groups=groups,
        max_norm=config.aggregation.max_norm,
        clip=config.aggregation.clip,
        optimizer=ServerOptimizer(server.optimizer, server.lr, server.beta1, server.beta2, server.tau),
        uplink=make_chain(config.uplink, config.seed, secret) if communicates else NO_UPLINK,
        noise=_central_noise(config, _a_round(config, silos, groups), secret) if communicates else None,
    )
    privacy = promise(config, sorted(silos), groups) if communicates else None
    tasks = {silo.name: silo.task for silo in data}
    texts = {silo.name: len(silo.splits.train[0].texts) for silo in data if silo.splits.train}
    at_coordinator = None
    if labelled is not None:  # no silo can have this name
        at_coordinator = Silo(":coordinator", {labelled.task.name: tokenise(labelled.task, labelled.splits.train)}, {})
    central = None
    if config.partition.name != "none":
        central = next(found for silo in silos.values() for found in silo.evaluations.values())
    malicious = () if backdoor is None else tuple(sorted(backdoor.malicious))
    return Federation(
        config,
        backbone,
        method,
        silos,
        training,
        coordinator,
        tasks,
        texts,
        at_coordinator,
        central,
        malicious,
        absent,
        privacy,
        choose(config.cohort, training),
    )


def _central_noise(config: Config, a_round: int, secret: bytes | None) -> CentralNoise | None:
    chosen = config.aggregation
    if chosen.noise_multiplier is None:
        return None
    assert chosen.clip is not None, "the section refuses less"
    return CentralNoise(chosen.noise_multiplier, chosen.clip, a_round, config.seed, secret)


def promise(config: Config, silos: Sequence[str], groups: Mapping[str, str] | None) -> Privacy | None:
    """What a run over these silos promises; None without noise. It follows from the configuration and names alone."""
    sampling = config.sampling
    chooser = Coordinator(
        {}, AGGREGATIONS["uniform"], config.seed, fraction=sampling.fraction, count=sampling.count, groups=groups
    )
    return make_privacy(config, sampled_sizes(config, silos, groups), lambda number: chooser.choose(number, silos))


def sampling_groups(config: Config, data: Iterable[SiloData]) -> dict[str, str] | None:
    """Silo → the group that silos are drawn from by themselves: its task; None: from all."""
    return {silo.name: silo.task.name for silo in data} if config.sampling.per_task else None


def _a_round(config: Config, silos: Iterable[str], groups: Mapping[str, str] | None) -> int:
    """How many silos take part in a round."""
    return sum(chosen for _, chosen in sampled_sizes(config, silos, groups))


def sampled_sizes(config: Config, silos: Iterable[str], groups: Mapping[str, str] | None) -> list[tuple[int, int]]:
    """Per group of silos (all are one without groups): how many there are, and how many take part in a round."""
    sizes = Counter("" if groups is None else groups[name] for name in silos)
    sampling = config.sampling
    return [(size, silos_a_round(size, sampling.fraction, sampling.count)) for _, size in sorted(sizes.items())]


def _aggregation(config: Config, a_round: int, communicates: bool) -> Aggregation:
    if not communicates:  # nothing is combined, so no number of silos is too small
        return AGGREGATIONS["uniform"]
    return make_aggregation(config.aggregation, a_round)


def _backdoor(config: Config, data: list[SiloData], method: Method, backbone: Backbone) -> Backdoor:
    check_trigger(config.attack.triggers, backbone.tokenizer)
    whole = method.setting.head.tokeniser(backbone, _ANY_LENGTH)

    def lengths(task: Task, rows: Sequence[Row]) -> list[int]:
        return [len(ids) for ids in whole(task, rows).ids]

    return make_backdoor(config.attack, config.seed, data, lengths, config.train.max_length)


def make_silos(
    data: list[SiloData], tokenise: Tokenise, method: Method, backdoor: Backdoor | None = None
) -> dict[str, Silo]:
    """Silos with their rows tokenised; a centralised method puts them together."""
    silos: dict[str, Silo] = {}
    evaluations: dict[tuple[int, int], Evaluation] = {}  # silos that are judged on the same rows share them
    for item in data:
        held_out = (item.splits.validation, item.splits.test)
        key = (id(held_out[0]), id(held_out[1]))
        if key not in evaluations:
            validation, test = (tokenise(item.task, rows) for rows in held_out)
            evaluations[key] = Evaluation(validation, test)
            if backdoor is not None and backdoor.concerns(item.task):
                attacked = tokenise(item.task, backdoor.test_rows(item.task, held_out[1]))
                evaluations[key].attack = AttackedRows(attacked, backdoor.target(item.task))
        added = [] if backdoor is None else backdoor.poisoned(item)
        train = [*item.splits.train, *added]
        rows = replace(tokenise(item.task, without_labels(train) if method.unlabelled else train), poisoned=len(added))
        silos[item.name] = Silo(item.name, {item.task.name: rows}, {item.name: evaluations[key]})
        if backdoor is not None and item.name in backdoor.malicious:
            silos[item.name].attack_scale = backdoor.config.scale
    if not method.centralised:
        return silos
    return _put_together(silos)


def _put_together(silos: dict[str, Silo]) -> dict[str, Silo]:
    """One training silo of all silos' rows, judged on each silo's rows."""
    train: dict[str, TokenisedRows] = {}
    for silo in sorted(silos.values(), key=lambda silo: silo.name):  # the order in which they were named cannot matter
        for task, found in silo.train.items():
            train[task] = train[task].joined(found) if task in train else found
    evaluations = {name: evaluation for silo in silos.values() for name, evaluation in silo.evaluations.items()}
    return {"centralised": Silo("centralised", train, evaluations)}


def _check_evaluation(config: Config, method: Method, data: list[SiloData], absent: list[SiloData]) -> None:
    """A model can be asked about any task only where its head can answer it."""
    evaluation, head = config.evaluation, method.setting.head
    tasks = {silo.task.name for silo in [*data, *absent]}
    if (evaluation.test_time or absent) and head.has_tensors and len(tasks) > 1:
        raise InputError(
            f"evaluation: a silo's head={config.head.name} knows its own task alone, and there are {len(tasks)}; "
            "allowed: head=lm or verbalizer, or silos of one task (data.task)"
        )
    for silo in absent:
        if silo.task.kind != head.task_kind:
            raise InputError(f"head={config.head.name}: cannot answer {silo.name!r} of evaluation; leave it out")
    if evaluation.new_silos and method.prediction().weighting is None:
        raise InputError(
            f"evaluation.new_silos: method {method.name} does not compare texts with silos' rows; allowed: feddpa-f, "
            "feddpa-t with method.weighting=dynamic"
        )


def check_data(config: Config, method: Method, data: list[SiloData]) -> None:
    """Refuse silos that the method, the head or the sampling cannot do with.

    Raises:
        InputError: naming the key and what is allowed.
    """
    sampling = config.sampling
    if sampling.count is not None and not method.centralised:
        for task, found in Counter(silo.task.name if sampling.per_task else "" for silo in data).items():
            if sampling.count > found:
                of_task = f" of task {task!r}" if sampling.per_task else ""
                raise InputError(f"sampling.count: {sampling.count} silos a round, but there are only {found}{of_task}")
    head = method.setting.head
    for silo in data:
        if silo.task.kind != head.task_kind:
            fitting = sorted(name for name, other in HEADS.items() if other.task_kind == silo.task.kind)
            rows = "texts with labels" if silo.task.kind == "classification" else "instructions with outputs"
            raise InputError(f"head={config.head.name}: silo {silo.name!r} holds {rows}; allowed: {', '.join(fitting)}")
    if config.attack.name != "none":
        check_attack(config.attack, data)
    if head.soft_slot and not method.setting.tuner.soft_prompt:
        having = ", ".join(sorted(name for name, tuner in TUNERS.items() if tuner.soft_prompt))
        raise InputError(
            f"head.template: {{soft}} is a place for a soft prompt; tuner={config.tuner.name} has none; "
            f"allowed: {having}"
        )
    parts = method.parts()
    tasks = sorted({silo.task.name for silo in data})
    shared_parts = names_with(parts, Scope.SHARED)
    if (
        config.head.scope == "shared"
        and shared_parts
        and not any(isinstance(parts[n].module, Head) for n in shared_parts)
    ):
        raise InputError(f"head.scope=shared: method {method.name} keeps its heads in the silos; allowed: private")
    shares_head = any(parts[name].module is head for name in names_with(parts, Scope.SHARED))
    if shares_head and head.has_tensors and len(tasks) > 1:
        remedy = "use head.scope=private" if config.head.scope == "shared" else f"method={method.name} shares its head"
        raise InputError(f"head.scope: a shared head needs one task in all silos, found {', '.join(tasks)}; {remedy}")
