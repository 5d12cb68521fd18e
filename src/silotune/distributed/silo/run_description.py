"""Describes a run to the operator who approves it: what leaves, how it is protected, what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from silotune.communication.privacy.budget import DELTA
from silotune.config.trees import flat
from silotune.distributed.silo.approvals import PLAN
from silotune.distributed.silo.mask_work import masks_line
from silotune.distributed.silo.silo_config import SiloSettings

if TYPE_CHECKING:
    from silotune.config import Config
    from silotune.distributed.silo.approvals import WaitingRun
    from silotune.training.federation import Federation
    from silotune.training.row_privacy import RowPlan

LONGEST_VALUE = 200
"""Characters of a value that are shown."""

NOISE = "noise: "
"""The beginning of the line on a run's noise."""


def describe(config: Config, federation: Federation, settings: SiloSettings, rows: RowPlan | None = None) -> list[str]:
    """Return lines about a run that waits for approval.

    Args:
        config: the run's, as it was sent.
        federation: this silo's own, built from the configuration.
        settings: the operator's.
        rows: the noise on rows that the ledger allows; None without.
    """
    from silotune.distributed.silo.policy import backbone_parameters

    shapes = federation.coordinator.expected.shapes
    numbers: dict[str, int] = {}
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        part = name.split("/", 1)[0]
        numbers[part] = numbers.get(part, 0) + count
    total, whole = sum(numbers.values()), backbone_parameters(federation.backbone)
    shared = "how many there are" if rows is not None else ", ".join(settings.share) or "none"
    if config.aggregation.secure:
        shared = "none; how many there are is summed under masks"
    return [
        *_training(config),
        *_rank(federation, settings.name),
        "leaves in a round: "
        + (", ".join(f"part {part!r} ({count:,} numbers)" for part, count in sorted(numbers.items())) or "no part"),
        f"in numbers: {total:,} a round, {100 * total / whole:.2f} % of the backbone; {total * config.rounds:,} in the "
        "whole run",
        f"numbers about the rows that are shared: {shared}",
        f"names that leave before round 1: of the task and of its labels ({_labels(federation)})",
        f"{NOISE}{_noise(federation, settings)}" if rows is None else noise_on_rows(config, rows, settings),
        *([f"under masks: {masks_line(settings)}"] if config.aggregation.secure else []),
        *who_learns_what(config, settings),
        f"combined, as the coordinator says, by: {config.aggregation.name}",
        f"silos, as it says: {', '.join(config.federation.silos) or 'not named'}",
        *_changed_keys(config),
    ]


def describe_unfit(config: Config, reason: str) -> list[str]:
    """Return lines about a run that cannot take place here; its coordinator learns the reason if it is approved."""
    return [*_training(config), f"cannot take place here: {reason}", *_changed_keys(config)]


def _changed_keys(config: Config) -> list[str]:
    """Return lines with the keys of a configuration that differ from the schema's defaults."""
    federation = config.federation.model_dump(mode="json")
    defaults = dict(flat(type(config).model_validate({"federation": federation}).model_dump(mode="json")))
    given = dict(flat(config.model_dump(mode="json")))
    changed = [f"  {key} = {shown(given, key)}" for key in given if key not in defaults or defaults[key] != given[key]]
    return ["keys off their defaults:", *changed] if changed else ["keys off their defaults: none"]


def _training(config: Config) -> list[str]:
    train = config.train
    passes = f"{train.epochs} epochs" if train.steps is None else f"{train.steps} steps"
    return [
        f"method: {config.method.name}, tuner {config.tuner.name}, head {config.head.name} ({config.head.scope})",
        f"training: {config.rounds} rounds, each {passes} of {train.batch_size} rows a step, {train.optimizer} with "
        f"learning rate {train.lr:g}, rows cut at {train.max_length} tokens",
    ]


def _rank(federation: Federation, silo: str) -> list[str]:
    rank = federation.context.initial.ranks.get(silo)
    return [] if rank is None else [f"LoRA's rank: {rank} here, {federation.method.setting.tuner.rank} in the run"]


def _labels(federation: Federation) -> str:
    words = {"regression": "numbers, which stay", "generation": "texts"}
    return "; ".join(f"{task.name}: {', '.join(task.labels) or words[task.kind]}" for task in federation.tasks.values())


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
    privacy, budget = config.privacy, settings.privacy
    limit = "no limit" if budget is None else f"at most ε = {budget.epsilon:g} at δ = {budget.delta:g}"
    return (
        f"{NOISE}on {plan.steps[-1]} steps, {plan.multiplier:.3g} times the bound {privacy.clip:g} on each "
        f"{plan.unit}'s gradient; the run aims at ε = {privacy.epsilon:g} at δ = {privacy.delta or DELTA:g}; over all "
        f"runs: {limit}"
    )


def who_learns_what(config: Config, settings: SiloSettings) -> list[str]:
    """Return three lines on what a run can tell the coordinator, the other silos, and users of the model."""
    unit, own = config.privacy.unit, "users of this silo's own model: whatever its private parts have learned"
    if unit is None:
        tells = "whatever updates tell about single rows" if config.uplink.noise is None else "noised updates"
        learned = f"{tells}, and {', '.join(settings.share) or 'no'} numbers"
        if config.aggregation.secure:
            learned = "the sum of the silos' updates, and of their weights"
        return [f"the coordinator learns: {learned}", "other silos learn: what the combined parts tell", own]
    return [
        f"the coordinator learns: how many {unit}s there are, and noised updates; of each {unit} at most what ε allows",
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
