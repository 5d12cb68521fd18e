"""Describes a plan at a silo: several runs that a coordinator proposes together, for one approval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from silotune.config import Config
from silotune.config.trees import flat
from silotune.distributed.protocol.frames import ProtocolError, check_run_id, printable, require_fields
from silotune.distributed.silo.approvals import PLAN, approved_part
from silotune.distributed.silo.run_description import shown
from silotune.errors import SilotuneError
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


def describe_plan(runs: Sequence[PlannedRun]) -> list[str]:
    """Return lines about a plan: the total that leaves, the settings all runs share, and the differences of each."""
    trees = [dict(flat(approved_part(run.config))) for run in runs]
    every = dict.fromkeys(key for tree in trees for key in tree)
    differing = [key for key in every if len({repr(tree.get(key)) for tree in trees}) > 1]
    common = [line for line in runs[0].description if all(line in run.description for run in runs)]
    total, rounds = sum(run.numbers for run in runs), sum(run.config.rounds for run in runs)
    lines = [f"plan of {len(runs)} runs, one approval for all: {', '.join(run.name for run in runs)}"]
    lines += [f"leaves in all: {total:,} numbers in {rounds} rounds", *common]
    for run, tree in zip(runs, trees, strict=True):
        keys = ", ".join(f"{key} = {shown(tree, key)}" for key in differing if key in tree)
        lines.append(f"run {run.name}: {keys or 'no other key'}")
        lines += [f"  {line}" for line in run.description if line not in common and not line.startswith("  ")]
    return lines
