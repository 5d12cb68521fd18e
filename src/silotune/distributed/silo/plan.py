"""Describes a plan at a silo: several runs that a coordinator proposes together, for one approval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from silotune.config import Config
from silotune.config.trees import flat
from silotune.distributed.protocol.frames import ProtocolError, check_run_id, require_fields
from silotune.distributed.silo.approvals import PLAN, approved_part
from silotune.distributed.silo.run_description import describe_unfit, shown
from silotune.distributed.silo.setup import DoesNotFit, Prepared
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
        noise: digest of the configuration, and the noise on rows that meets its own target; None without.
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

    @classmethod
    def of(cls, name: str, run: str, prepared: Prepared, description: list[str], hello: dict[str, Any]) -> PlannedRun:
        """Return a run that can take place here."""
        config, noise = prepared.config, None if prepared.row_plan is None else (prepared.digest, prepared.row_plan)
        numbers = config.rounds * sum(map(math.prod, prepared.federation.coordinator.expected.shapes.values()))
        return cls(name, run, config, description, numbers, prepared.parameters, hello, noise)

    @classmethod
    def that_does_not_fit(cls, name: str, run: str, error: DoesNotFit) -> PlannedRun:
        """Return a run that cannot take place here."""
        return cls(name, run, error.config, describe_unfit(error.config, str(error.reason)), unfit=error.reason)


def read_plan(cells: object) -> list[list[Any]]:
    """Return name, id, configuration and identity of each run in a request.

    Raises:
        ProtocolError: it is no list of different runs, or of too many.
    """
    if not isinstance(cells, list) or not 1 <= len(cells) <= MOST_RUNS or not all(isinstance(c, dict) for c in cells):
        raise ProtocolError(f"a plan must be a list of at most {MOST_RUNS} runs")
    runs = [require_fields(cell, "name", "run", "config", "identity") for cell in cells]
    for _, run, *_ in runs:
        check_run_id(run if isinstance(run, str) else "")
    if len({run for _, run, *_ in runs}) < len(runs):
        raise ProtocolError("a plan that names a run twice")
    return runs


def plan_configuration(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the configuration that an approval of a plan covers: each run's id and configuration, in order."""
    return {PLAN: [[run.run, approved_part(run.config)] for run in runs]}


def describe_plan(runs: Sequence[PlannedRun]) -> list[str]:
    """Return lines about a plan: the total that leaves, the settings all runs share, and the differences of each."""
    trees = [dict(flat(approved_part(run.config))) for run in runs]
    differing = [
        key for key in {**dict.fromkeys(k for t in trees for k in t)} if len({repr(t.get(key)) for t in trees}) > 1
    ]
    common = [line for line in runs[0].description if all(line in run.description for run in runs)]
    total = sum(run.numbers for run in runs)
    lines = [
        f"plan of {len(runs)} runs, one approval for all: {', '.join(run.name for run in runs)}",
        f"leaves in all: {total:,} numbers in {sum(run.config.rounds for run in runs)} rounds",
        *common,
    ]
    for run, tree in zip(runs, trees, strict=True):
        keys = ", ".join(f"{key} = {shown(tree, key)}" for key in differing if key in tree)
        lines.append(f"run {run.name}: {keys or 'no other key'}")
        lines += [f"  {line}" for line in run.description if line not in common and not line.startswith("  ")]
    return lines
