"""Build a run's objects from its configuration: model, silos and coordinator, with all checks before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from silotune.communication.masks.fixed_point import require_masks
from silotune.config import Config
from silotune.data.loading import draw_labeled_rows, load_absent, load_silos, own_labeled_rows
from silotune.data.own_rows import own_warnings
from silotune.data.row_checks import MOST_WARNINGS, as_one, token_warnings, warnings_of
from silotune.data.rows import SiloData
from silotune.data.tokenized import ANY_LENGTH, MOST_LOOKED_AT, count_cuts, cut_text
from silotune.errors import InputError
from silotune.methods.parts import Scope, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads import Head, LanguageModelHead
from silotune.runs.build.coordinator import build_coordinator
from silotune.runs.build.model import BackboneRequirements, build_model
from silotune.runs.build.plan_row_noise import plan_row_noise
from silotune.runs.build.resolve import check_ranks, resolve
from silotune.runs.build.silos import absent_silo, build_silos, server_silo
from silotune.runs.build.validation import check_labels, check_tasks
from silotune.training.at_once import choose_cohort
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.initial_parts import TrainedParts
from silotune.training.phase_batches import check_rows
from silotune.training.shared_step import SharedStep

_MANY = 0.5
"""Share of a silo's rows from which cuts are warned of, or refused."""


def build(
    config: Config,
    backbone: Backbone | None = None,
    data: list[SiloData] | None = None,
    labeled: SiloData | None = None,
    load: Callable[[BackboneRequirements], Backbone] = BackboneRequirements.load,
    look: Callable[[list[SiloData], TrainingContext, list[str]], None] | None = None,
) -> Federation:
    """Build a federation whose silos' rows are all on this machine.

    Backbone and rows are loaded unless they are given; who gives rows calls `Head.check_names` and `check_labels`. The
    coordinator's labeled rows are drawn from the silos' rows if the method needs them and they are not given. `look` is
    called once all is built with the silos' rows (the federation keeps them as token ids only), the model, and a line
    for each silo whose rows are cut.
    """
    absent = load_absent(config) if data is None else []
    rows = load_silos(config) if data is None else data
    config, method = resolve(config, rows, backbone)
    if data is None:
        method.setting.head.check_names(silo.task for silo in [*rows, *absent])
        check_labels(config, (silo.task for silo in [*rows, *absent]))
    if config.aggregation.secure:
        require_masks(len(rows), config.aggregation.least, config.aggregation.colluders)
    tasks = {silo.name: silo.task for silo in rows}
    absent_tasks = {silo.name: silo.task for silo in absent}
    check_ranks(method, [*tasks, *absent_tasks])
    if labeled is None and method.needs_labeled_rows:
        labeled = own_labeled_rows(config)
    check_tasks(config, method, tasks, absent_tasks, None if labeled is None else labeled.task)
    context = build_model(config, method, [*tasks.values(), *absent_tasks.values()], backbone, load)
    config = config.replace(train={"tokens_at_once": context.tokens_at_once})  # the run folder says what `auto` came to
    if labeled is None and method.needs_labeled_rows:
        labeled = draw_labeled_rows(rows, config.server, config.data_seed)
    silos, malicious = build_silos(config, context, rows, labeled if method.labeled_only else None)
    server = server_silo(context, labeled) if labeled is not None and method.server_phases() else None
    outside = {silo.name: absent_silo(context, silo) for silo in absent}
    check_rows(context, [*silos.values(), *([server] if server else [])], config.privacy.unit is not None)
    coordinator, privacy = build_coordinator(config, context, silos, tasks, labeled is not None)
    if config.privacy.unit is not None:
        context.row_privacy, privacy = plan_row_noise(
            config, context, silos, lambda number: coordinator.choose(number, list(silos))
        )
        if (shares := context.row_privacy.shares) is not None:
            coordinator.shared_step = SharedStep(shares, context)
    cuts = cut_lines(config, rows, context) if config.head.writes or look is not None else []
    if look is not None:
        look(rows, context, cuts)
    return Federation(
        config,
        context,
        silos,
        coordinator,
        tasks,
        texts={silo.name: len(silo.splits.train[0].texts) for silo in rows if silo.splits.train},
        server=server,
        malicious=malicious,
        absent=outside,
        privacy=privacy,
        cohort=choose_cohort(config.cohort, context, silos.values()),
    )


def cut_lines(config: Config, silos: Sequence[SiloData], context: TrainingContext) -> list[str]:
    """Say of which silos rows are cut; refuse written answers to questions most of which the model would not read."""
    head, length, backbone = context.method.setting.head, config.train.max_length, context.backbone
    if head.long_texts.reads != "cut":
        return []
    refuses = config.head.writes and not config.data.allow_cut
    tokenize, whole = (head.row_tokenizer(backbone, most) for most in (length, ANY_LENGTH))
    lines = []
    for silo in as_one(silos, config.partition.name != "none"):
        cuts = count_cuts(silo.task, silo.splits.train[:MOST_LOOKED_AT], tokenize, whole)
        if cuts.prompts or cuts.fraction > _MANY:
            lines.append(cut_text(silo, cuts, length, prompt_room(head, backbone, length)))
            if refuses and cuts.fraction > _MANY:
                raise InputError(f"{lines[-1]}; raise train.max_length, or give data.allow_cut=true")
    return lines


def prompt_room(head: Head, backbone: Backbone, length: int) -> int | None:
    """Return the most tokens of a prompt; None for a head without prompts."""
    if not isinstance(head, LanguageModelHead):
        return None
    return length if backbone.base.config.is_encoder_decoder else head.prompt_room(length)


def run_warnings(
    config: Config, silos: Sequence[SiloData], context: TrainingContext, cuts: Sequence[str] = ()
) -> list[str]:
    """Return the warnings of a run over these silos' rows and their tokens, a line each."""
    tokenize = context.method.setting.head.row_tokenizer(context.backbone, config.train.max_length)
    further = partial(token_warnings, tokenizer=context.backbone.tokenizer, tokenize=tokenize)
    lines = [*cuts[:MOST_WARNINGS], *warnings_of(silos, config.partition.name != "none", further)]
    start = context.initial.start
    if isinstance(start, TrainedParts) and names_with(context.parts, Scope.PRIVATE):
        new = [silo.name for silo in silos if start.read(silo.name) is None]
        lines += [f"silo {name!r}: not in start={start.source}; its private parts begin untrained" for name in new]
    if config.uplink.bare_noise is not None:
        lines.append(f"uplink.scale: {config.uplink.bare_noise} noise without a clip promises nothing: there is no ε")
    return [*lines, *own_warnings(silos, config.partition), *pooling_warnings(config)]


def pooling_warnings(config: Config) -> list[str]:
    """Warn of a backbone that was trained with mean pooling and is read otherwise."""
    name, pooled = config.backbone.name, config.head.name in ("linear", "mlp")
    if name not in ("default", "mpnet") or not pooled or config.head.pooling == "mean":
        return []
    return [f"head.pooling=first: the {name} backbone was trained with mean pooling (head.pooling=mean)"]
