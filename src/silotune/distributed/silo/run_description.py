"""Describes a run, or a plan of several, to the operator who approves it: what leaves, how protected, what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

from silotune.communication.privacy.accountant import DELTA, assuming
from silotune.config import Config
from silotune.config.trees import flat
from silotune.distributed.protocol.frames import ProtocolError, check_run_id, printable, require_fields
from silotune.distributed.silo.approvals import PLAN, WaitingRun, approved_part
from silotune.distributed.silo.local_config import allowed_figures
from silotune.distributed.silo.mask_work import masks_line
from silotune.distributed.silo.policy import backbone_parameters
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import SiloStore
from silotune.errors import InputError, SilotuneError
from silotune.runs.build.resolve import make_method, with_options
from silotune.training.federation import Federation
from silotune.training.row_privacy import RowPlan

LONGEST_VALUE = 200
"""Characters of a value that are shown."""

NOISE = "noise: "
"""The beginning of the line on a run's noise."""


def describe(config: Config, federation: Federation, settings: SiloSettings, rows: RowPlan | None = None) -> list[str]:
    """Return lines about a run that waits for approval."""
    if config.work == "survey":
        return _survey(config, federation, settings, rows)
    rounds = [federation.sent_numbers(number) for number in federation.method.kinds_of_rounds(config.rounds)]
    numbers, most = reduce(or_, rounds, Counter[str]()), max((counts.total() for counts in rounds), default=0)
    whole = backbone_parameters(federation.backbone)
    rank, planned = federation.context.initial.ranks.get(settings.name), federation.method.setting.tuner.rank
    shared = "how many there are" if rows is not None else ", ".join(settings.share) or "none"
    if config.aggregation.secure:
        shared = "none; how many there are is summed under masks"
    return [
        *_training(config),
        *([] if rank is None else [f"LoRA's rank: {rank} here, {planned} in the run"]),
        "leaves in a round: "
        + (", ".join(f"part {part!r} ({count:,} numbers)" for part, count in sorted(numbers.items())) or "no part"),
        f"in numbers: at most {most:,} a round, {100 * most / whole:.2f} % of the backbone; "
        f"{federation.numbers_in_all:,} in the whole run",
        f"numbers about the rows that are shared: {shared}",
        f"names that leave before round 1: of the task and of its labels ({_labels(federation)})",
        f"{NOISE}{_noise(federation, settings)}" if rows is None else noise_on_rows(config, rows, settings),
        *([f"under masks: {masks_line(settings)}"] if config.aggregation.secure else []),
        *who_learns_what(config, settings),
        f"combined, as the coordinator says, by: {config.aggregation.name}",
        f"silos, as it says: {', '.join(config.federation.silos) or 'not named'}",
        *_changed_keys(config),
    ]


def _survey(config: Config, federation: Federation, settings: SiloSettings, rows: RowPlan | None) -> list[str]:
    """Return lines about a run that only asks for counts of rows."""
    answers = allowed_figures(settings, config)
    refusals = [figure for figure in config.survey.figures if figure not in answers]
    noise = "none" if rows is None else f"{rows.multiplier:.3g} times what a {rows.unit} moves counts by; "
    return [
        f"survey: how many rows this silo has, by {', '.join(answers)}; no row trains anything",
        f"asked, and stays here: {', '.join(refusals) or 'nothing'}",
        f"names that leave: of the task and of its labels ({_labels(federation)})",
        NOISE + noise + ("" if rows is None else _targets(config, settings, rows)),
        "the coordinator learns: these counts, all below 10 as '< 10'; it may tell the other silos",
        *_changed_keys(config),
    ]


def describe_unfit(config: Config, reason: str) -> list[str]:
    """Return lines about a run that cannot take place here; its coordinator learns the reason if it is approved."""
    return [*_training(config), f"cannot take place here: {reason}", *_changed_keys(config)]


def _changed_keys(config: Config) -> list[str]:
    """Return lines with the keys of a configuration that differ from the defaults of its method and tuner."""
    choices = {"federation": config.federation.model_dump(mode="json")}
    choices |= {key: getattr(config, key).name for key in ("method", "tuner")}
    plain = type(config).model_validate(choices)
    with suppress(InputError):  # else options have no defaults that go with the method and tuner
        plain = with_options(plain, make_method(plain))
    defaults = dict(flat(plain.model_dump(mode="json")))
    tree = dict(flat(config.model_dump(mode="json")))
    changed = [f"  {key} = {shown(tree, key)}" for key in tree if key not in defaults or defaults[key] != tree[key]]
    return ["keys off their defaults:", *changed] if changed else ["keys off their defaults: none"]


_LONG = {
    "cut": "rows cut at {} tokens",
    "windows": "long rows read in windows of {} tokens",
    "refuse": "no rows of more than {} tokens",
}


def _training(config: Config) -> list[str]:
    train = config.train
    if config.work != "training":
        model = "the untouched backbone" if config.start is None else f"the model of {config.start}"
        return [
            f"scoring: {model} on this silo's validation and test rows; no row trains anything, and the scores in "
            f"`share` leave (method {config.method.name}, tuner {config.tuner.name}, head {config.head.name})"
        ]
    passes = f"{train.epochs} epochs" if train.steps is None else f"{train.steps} steps"
    return [
        f"method: {config.method.name}, tuner {config.tuner.name}, head {config.head.name} ({config.head.scope})",
        f"training: {config.rounds} rounds, each {passes} of {train.batch_size} rows a step, {train.optimizer} with "
        f"learning rate {train.lr:g}, {_LONG[config.data.long_texts].format(train.max_length)}",
    ]


def _labels(federation: Federation) -> str:
    words = {True: "numbers, which stay", False: "texts"}
    return "; ".join(
        f"{task.name}: {', '.join(task.labels) or words[task.labeled]}" for task in federation.tasks.values()
    )


def _noise(federation: Federation, settings: SiloSettings) -> str:
    config, privacy = federation.config, federation.privacy
    if config.uplink.noise is None or privacy is None:
        sees = "their sum over the silos" if config.aggregation.secure else "each change of the parts as it is"
        return f"none; the coordinator sees {sees}"
    budget = "no limit" if settings.epsilon in (None, "unlimited") else f"at most {settings.epsilon:g}"
    return (
        f"{config.uplink.noise}, ε = {privacy.epsilon_round:g} a round, "
        f"ε = {privacy.account.total(privacy.uses):.4g} in the run; over all runs: {budget}"
    )


def noise_on_rows(config: Config, plan: RowPlan, settings: SiloSettings) -> str:
    """Return the line on noise that follows from the run's own target and the remaining budget."""
    return (
        f"{NOISE}on {plan.steps[-1]} steps, {plan.multiplier:.3g} times the bound {config.privacy.clip:g} on each "
        f"{plan.unit}'s gradient{', of which this silo adds its share' if config.privacy.shares else ''}; "
        f"{_targets(config, settings, plan)}"
    )


def _targets(config: Config, settings: SiloSettings, rows: RowPlan) -> str:
    """Return the ε that a run aims at, and the operator's limit on that of all runs."""
    privacy, budget = config.privacy, settings.privacy
    limit = "no limit" if budget is None else f"at most ε = {budget.epsilon:g} at δ = {budget.delta:g}"
    assumed = assuming(rows.colluders)
    return f"the run aims at ε = {privacy.epsilon:g} at δ ≤ {privacy.delta or DELTA:g}{assumed}; over all runs: {limit}"


def who_learns_what(config: Config, settings: SiloSettings) -> list[str]:
    """Return three lines on what a run can tell the coordinator, the other silos, and users of the model."""
    unit, own = config.privacy.unit, "users of this silo's own model: whatever its private parts have learned"
    if config.privacy.parts == "all":
        own = f"users of this silo's own model: no more of each {unit} either"
    if unit is None:
        tells = "whatever updates tell about single rows" if config.uplink.noise is None else "noised updates"
        learned = f"{tells}, and {', '.join(settings.share) or 'no'} numbers"
        if config.aggregation.secure:
            learned = "the sum of the silos' updates, and of their weights"
        return [f"the coordinator learns: {learned}", "other silos learn: what the combined parts tell", own]
    view = "the noised sum of the silos' gradients" if config.privacy.shares else "noised updates"
    return [
        f"the coordinator learns: how many {unit}s there are, and {view}; of each {unit} at most what ε allows",
        f"other silos learn: the combined parts, so no more of each {unit} either",
        own,
    ]


def changes(run: WaitingRun, earlier: WaitingRun | None) -> Iterator[str]:
    """Yield one line per key in which a run differs from an earlier one."""
    if earlier is None:
        yield "no run was approved before"
        return
    if PLAN in run.configuration:  # it lists the keys in which its runs differ
        return
    before, now = dict(flat(earlier.configuration)), dict(flat(run.configuration))
    differing = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    yield f"against the last approved run ({earlier.name}): {len(differing) or 'no'} keys changed"
    for key in differing:
        yield f"  {key}: {shown(before, key)} → {shown(now, key)}"


def shown(values: Mapping[str, Any], key: str) -> str:
    """Return a key's value for the operator, shortened."""
    text = repr(values[key]) if key in values else "unset"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}… ({len(text):,} characters)"


MOST_RUNS = 100
"""Runs of a plan: each is prepared before the operator is asked, who reads about all of them."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan, as it came out over this silo's rows.

    Args:
        noise: `Prepared.recipe`, and the noise on rows that meets its own target, if it has some.
        epsilon: of its noise on whole updates, plainly added up over its rounds.
        unfit: why it cannot take place here, for the coordinator once the plan is approved.
    """

    name: str
    run: str
    config: Config
    description: list[str]
    numbers: int = 0
    parameters: int = 0
    hello: dict[str, Any] | None = None
    noise: tuple[str, RowPlan] | None = None
    epsilon: float = 0.0
    unfit: SilotuneError | None = None


def read_plan(cells: object) -> list[list[Any]]:
    """Return name, id, configuration and identity of each run in a request."""
    if not isinstance(cells, list) or not 1 <= len(cells) <= MOST_RUNS or not all(isinstance(c, dict) for c in cells):
        raise ProtocolError(f"a plan must be a list of at most {MOST_RUNS} runs")
    runs = [require_fields(cell, "name", "run", "config", "identity") for cell in cells]
    for run in runs:
        check_run_id(run[1] if isinstance(run[1], str) else "")
    return [[printable(str(name), 80), *others] for name, *others in runs]


def plan_configuration(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the configuration that an approval of a plan covers: each run's id and configuration, in order."""
    return {PLAN: [[run.run, approved_part(run.config)] for run in runs]}


class Undone(Exception):
    """Ends a transaction of which nothing is kept."""


def noise_in_all(
    runs: Sequence[PlannedRun], settings: SiloSettings, store: SiloStore
) -> tuple[list[PlannedRun], list[str]]:
    """Return the runs with the noise that an approval would set aside for each, and lines on their total.

    A later run needs more noise for what earlier ones take of the budget. Nothing is set aside here.
    """
    ledger, plans, lines = store.ledger, dict[str, RowPlan](), list[str]()
    noised = [(run, *run.noise) for run in runs if run.noise is not None]
    with suppress(Undone), store.records.transaction():
        before = [ledger.spent(plan.unit) for _, _, plan in noised[:1]]
        for run, recipe, proposal in noised:
            try:
                most = run.config.privacy.most_noise
                plans[run.run] = ledger.plan(run.run, recipe, proposal, reserve=True, most=most)
            except InputError as error:
                lines.append(f"cannot take place here: {run.name}: {error}")
                break
        after = [ledger.spent(plan.unit) for _, _, plan in noised[:1]]
        raise Undone
    if noised and settings.privacy is not None:
        budget = settings.privacy
        lines.append(
            f"noise on rows of all runs: ε = {after[0]:.4g} of {budget.epsilon:g} at δ = {budget.delta:g} for each "
            f"{budget.unit} would be spent or set aside, with ε = {before[0]:.4g} of earlier runs"
        )
    elif noised:
        targets = sum(run.config.privacy.epsilon or 0.0 for run, *_ in noised)
        lines.append(f"noise on rows of all runs: their targets add up to ε = {targets:.4g}; no limit is kept here")
    if epsilon := sum(run.epsilon for run in runs):
        lines.append(
            f"noise on updates of all runs: ε = {epsilon:.4g}, plainly added up; over all runs: "
            + ("no limit" if settings.budget is None else f"at most {settings.budget:g}")
            + f", of which ε = {store.spent('').epsilon:.4g} is spent"
        )
    noise = {run.run: noise_on_rows(run.config, plans[run.run], settings) for run in runs if run.run in plans}
    return [
        replace(
            run, description=[noise.get(run.run, line) if line.startswith(NOISE) else line for line in run.description]
        )
        for run in runs
    ], lines


def describe_plan(planned: Sequence[PlannedRun], settings: SiloSettings, store: SiloStore) -> list[str]:
    """Return lines about a plan: the total that leaves, the settings all runs share, and the differences of each."""
    runs, noise = noise_in_all(planned, settings, store)
    trees = [dict(flat(approved_part(run.config))) for run in runs]
    every = dict.fromkeys(key for tree in trees for key in tree)
    differing = [key for key in every if len({repr(tree.get(key)) for tree in trees}) > 1]
    common = [line for line in runs[0].description if all(line in run.description for run in runs)]
    total, rounds = sum(run.numbers for run in runs), sum(run.config.rounds for run in runs)
    lines = [f"plan of {len(runs)} runs, one approval for all: {', '.join(run.name for run in runs)}"]
    lines += [f"leaves in all: {total:,} numbers in {rounds} rounds", *noise, *common]
    for run, tree in zip(runs, trees, strict=True):
        keys = ", ".join(f"{key} = {shown(tree, key)}" for key in differing if key in tree)
        lines.append(f"run {run.name}: {keys or 'no other key'}")
        lines += [f"  {line}" for line in run.description if line not in common and not line.startswith("  ")]
    return lines
