"""Builds what a run consists of: loads the backbone and the data, and makes silos and coordinator."""

from __future__ import annotations

import torch

from silotune.config import Config
from silotune.data.loading import load_absent, load_silos
from silotune.data.server_rows import draw_labeled_rows
from silotune.data.tasks import SiloData
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.activation_cache import ActivationCache
from silotune.runs.build.coordinator import make_coordinator, privacy_guarantee, sampling_groups
from silotune.runs.build.initial_adapter import read_start
from silotune.runs.build.resolve import BackboneRequirements, make_method, on_this_machine
from silotune.runs.build.silos import backdoor, make_silos
from silotune.runs.build.validation import check_backbone, check_data, check_evaluation
from silotune.training.cohort import choose
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.silo import Silo


def build(
    config: Config,
    backbone: Backbone | None = None,
    data: list[SiloData] | None = None,
    labelled: SiloData | None = None,
) -> Federation:
    """Load the backbone and the data (unless given), and make silos and coordinator.

    `data`: some of the run's silos, perhaps: who has all of them calls `Head.check_names`.
    `labelled`: the coordinator's labeled rows, where they are its own; else they are drawn from the silos' rows.

    Raises:
        InputError: for anything that cannot work, before any training.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config = on_this_machine(config)
    method = make_method(config)
    tuner, head = method.setting.tuner, method.setting.head
    kept_out: list[SiloData] = []
    if data is None:
        data, kept_out = load_silos(config), load_absent(config)
        head.check_names(silo.task for silo in [*data, *kept_out])
    check_data(config, method, data, labelled)
    check_evaluation(config, method, data, kept_out)
    if backbone is None:
        backbone = BackboneRequirements.of(config, method).load()
    check_backbone(config, method, backbone)
    head.check(backbone, {silo.task.name: silo.task for silo in [*data, *kept_out]}.values())
    tokenize = head.row_tokenizer(backbone, config.train.max_length)
    rows = any(silo.splits.train for silo in data)  # a finished run is opened without
    if labelled is None and method.server_phases() and rows:
        labelled = draw_labeled_rows(data, config.server, config.data_seed)
    poisoning = backdoor(config, data, method, backbone)
    silos = make_silos(data, tokenize, method, poisoning)
    absent = {item.name: next(iter(make_silos([item], tokenize, method).values())) for item in kept_out}
    start = None if config.start is None else read_start(config.start, backbone, tuner)
    cache = None if config.cache.name == "none" else ActivationCache.for_tuner(backbone, tuner, config.cache.mib)
    context = TrainingContext(backbone, method, config.train, config.seed, start, cache)
    groups = None if method.centralized else sampling_groups(config, data)
    coordinator = make_coordinator(config, context.initial_shared(silos.values()), silos, groups)
    at_coordinator = None
    if labelled is not None:  # no silo can have this name
        at_coordinator = Silo(":coordinator", {labelled.task.name: tokenize(labelled.task, labelled.splits.train)}, {})
    central = None
    if config.partition.name != "none":
        central = next(found for silo in silos.values() for found in silo.evaluations.values())
    return Federation(
        config,
        backbone,
        method,
        silos,
        context,
        coordinator,
        tasks={silo.name: silo.task for silo in data},
        texts={silo.name: len(silo.splits.train[0].texts) for silo in data if silo.splits.train},
        server=at_coordinator,
        central=central,
        malicious=() if poisoning is None else tuple(sorted(poisoning.malicious)),
        absent=absent,
        privacy=privacy_guarantee(config, sorted(silos), groups, labelled is not None)
        if coordinator.communicates
        else None,
        cohort=choose(config.cohort, context),
    )
