"""Describes a plan at a silo: several runs that a coordinator proposes together, for one approval."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from silotune.config import Config
from silotune.config.trees import flat
from silotune.distributed.protocol.frames import ProtocolError, check_run_id, printable, require_fields
from silotune.distributed.silo.approvals import PLAN, approved_part
from silotune.distributed.silo.run_description import NOISE, noise_on_rows, shown
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import SiloStore
from silotune.errors import InputError, SilotuneError
from silotune.training.row_privacy import RowPlan

MOST_RUNS = 100
"""Runs of a plan: each is prepared before the operator is asked, who reads about all of them."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan, as it came out over this silo's rows.

    Args:
        name: the coordinator's name for it.
        run: its id.
        config: as it was sent.
        description: lines for the operator.
        numbers: how many leave in it.
        parameters: of its backbone.
        hello: fields of this silo's answer to its greeting.
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


class _Undone(Exception):
    """Ends a transaction of which nothing is kept."""


def noise_in_all(
    runs: Sequence[PlannedRun], settings: SiloSettings, store: SiloStore
) -> tuple[list[PlannedRun], list[str]]:
    """Return the runs with the noise that an approval would set aside for each, and lines on their total.

    Args:
        runs: the runs in order; a later one needs more noise for what earlier ones take of the budget.
        settings: the operator's.
        store: of the silo; nothing is set aside.
    """
    ledger, plans, lines = store.ledger, dict[str, RowPlan](), list[str]()
    noised = [(run, *run.noise) for run in runs if run.noise is not None]
    with suppress(_Undone), store.records.transaction():
        before = [ledger.spent(plan.unit) for _, _, plan in noised[:1]]
        for run, recipe, wanted in noised:
            try:
                plans[run.run] = ledger.plan(run.run, recipe, wanted, reserve=True)
            except InputError as error:
                lines.append(f"cannot take place here: {run.name}: {error}")
                break
        after = [ledger.spent(plan.unit) for _, _, plan in noised[:1]]
        raise _Undone
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
    return [_with_noise(run, plans[run.run], settings) if run.run in plans else run for run in runs], lines


def _with_noise(run: PlannedRun, plan: RowPlan, settings: SiloSettings) -> PlannedRun:
    """Return a run whose description has another line on noise."""
    line = noise_on_rows(run.config, plan, settings)
    return replace(run, description=[line if said.startswith(NOISE) else said for said in run.description])


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
