"""Keeps a silo's ledger of noise on rows: the share of each unit's budget that all runs have spent.

A run reserves what its rounds will cost when the silo first takes part. Each answer with other content than before is
charged in the transaction that records it, so that nothing leaves unpaid and a crash charges nothing twice. The budget
is checked by a Rényi filter (`communication/privacy/row_accountant.py`), because a coordinator chooses a run's noise
after it has seen the answers of others.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from silotune.communication.privacy.row_accountant import RenyiFilter
from silotune.core.records import Records
from silotune.distributed.silo.silo_config import RowBudget
from silotune.errors import InputError
from silotune.training.row_privacy import RowPlan

TABLES = """
CREATE TABLE IF NOT EXISTS row_orders (unit TEXT PRIMARY KEY, orders TEXT);
CREATE TABLE IF NOT EXISTS row_runs (run TEXT, config TEXT, unit TEXT, multiplier REAL, rate REAL, steps INTEGER,
    open INTEGER, PRIMARY KEY (run, config));
CREATE TABLE IF NOT EXISTS row_charges (asked TEXT PRIMARY KEY, run TEXT, config TEXT, unit TEXT, multiplier REAL,
    rate REAL, steps INTEGER, message TEXT);
"""


@dataclass(frozen=True)
class Charge:
    """The privacy cost of one answer (a silo's update), as the ledger checks and records it.

    Args:
        asked: digest of all that the answer depends on (`RowPrivacy.draws`); answers of equal digest are charged once.
        config: digest of the run's configuration (`Prepared.recipe`).
        plan: the run's noise; `number` is the answer's round in it.
        message: sha256 of the update; empty until it exists.
    """

    asked: str
    run: str
    config: str
    plan: RowPlan
    number: int
    message: str = ""

    @property
    def values(self) -> tuple[object, ...]:
        """A row of the table `row_charges`."""
        plan, steps = self.plan, self.plan.in_round(self.number)
        return self.asked, self.run, self.config, plan.unit, plan.multiplier, plan.rate, steps, self.message


class RowLedger:
    """Reserves and charges noised steps on a silo's rows.

    Args:
        budget: what the operator allows; None: costs are recorded and nothing is refused.
    """

    def __init__(self, records: Records, budget: RowBudget | None) -> None:
        self._records = records
        self.budget = budget

    def plan(self, run: str, config: str, wanted: RowPlan, reserve: bool = False) -> RowPlan:
        """Return a run's noise: the least that keeps to its own target, `wanted`, and to what is left of the budget.

        `reserve` sets the run's cost aside, which fixes the noise for its other rounds. Refused if no noise is enough.
        """
        query = "SELECT multiplier FROM row_runs WHERE run = ? AND config = ?"
        for (multiplier,) in self._records.rows(query, run, config):
            return replace(wanted, multiplier=multiplier)
        plan, steps = wanted, wanted.steps[-1]
        if (filter := self._filter(wanted.unit)) is not None and steps:
            least = filter.least_multiplier(self._costs(filter, wanted.unit), wanted.rate, steps)
            if least is None:
                raise InputError(f"the rest of the budget for each {wanted.unit} is too small for {steps} steps")
            plan = replace(wanted, multiplier=max(wanted.multiplier, least))
        if reserve:
            with self._records.transaction() as connection:
                values = run, config, plan.unit, plan.multiplier, plan.rate, steps
                connection.execute("INSERT INTO row_runs VALUES (?, ?, ?, ?, ?, ?, 1)", values)
        return plan

    def require(self, charge: Charge) -> None:
        """Refuse an answer that the budget cannot pay, or that differs from an earlier answer with the same draws."""
        for (message,) in self._records.rows("SELECT message FROM row_charges WHERE asked = ?", charge.asked):
            if charge.message and message != charge.message:
                raise InputError("the same draws gave another update than before; the difference would have no noise")
            return
        filter = self._filter(charge.plan.unit)
        if filter is None:
            return
        if not filter.allows(self._costs(filter, charge.plan.unit, charge)):
            raise InputError(f"the budget for each {charge.plan.unit} is spent")

    def charge(self, charge: Charge) -> None:
        """Record a charge in the transaction that stores its answer; the last round's also ends the reservation."""
        with self._records.transaction() as connection:
            self.require(charge)
            connection.execute("INSERT OR IGNORE INTO row_charges VALUES (?, ?, ?, ?, ?, ?, ?, ?)", charge.values)
            if charge.number == len(charge.plan.steps) - 1:
                self.close(charge.run)

    def close(self, run: str, again: bool = False) -> None:
        """Free what a run reserved and did not use; `again` reserves it once more."""
        with self._records.transaction() as connection:
            connection.execute("UPDATE row_runs SET open = ? WHERE run = ?", (int(again), run))

    def spent(self, unit: str) -> float | None:
        """Return the ε that answers and open reservations have cost each unit; None without a budget for it."""
        filter = self._filter(unit)
        return None if filter is None else filter.spent(self._costs(filter, unit))

    def _filter(self, unit: str) -> RenyiFilter | None:
        """Return the filter of a unit's budget; its orders are fixed by the first use."""
        budget = self.budget
        if budget is None or budget.unit != unit:
            return None
        filter = RenyiFilter.of(budget.epsilon, budget.delta)
        with self._records.transaction() as connection:
            orders = json.dumps(filter.orders)
            connection.execute("INSERT OR IGNORE INTO row_orders VALUES (?, ?)", (unit, orders))
            ((known,),) = connection.execute("SELECT orders FROM row_orders WHERE unit = ?", (unit,)).fetchall()
        return replace(filter, orders=tuple(json.loads(known)))

    def _costs(self, filter: RenyiFilter, unit: str, more: Charge | None = None) -> list[float]:
        """Return two costs at each order: of all answers, and of the unused reservations of open runs."""
        charges = "SELECT run, config, multiplier, rate, steps FROM row_charges WHERE unit = ?"
        charged = self._records.rows(charges, unit)
        if more is not None:
            plan = more.plan
            charged.append((more.run, more.config, plan.multiplier, plan.rate, plan.in_round(more.number)))
        used = [tuple(values) for _, _, *values in charged]
        reserved = "SELECT run, config, multiplier, rate, steps FROM row_runs WHERE unit = ? AND open = 1"
        for run, config, multiplier, rate, steps in self._records.rows(reserved, unit):
            taken = sum(row[-1] for row in charged if row[:2] == (run, config))
            used.append((multiplier, rate, max(0, steps - taken)))
        each = [filter.costs(*values) for values in used]
        return [math.fsum(costs) for costs in zip(*each, strict=True)] if each else [0.0] * len(filter.orders)
