"""Keeps a silo's ledger of noise on rows: what all runs have spent of each unit's budget.

A run reserves what its rounds will cost with its first answer, or when the silo's operator approves it. Each answer
with other content than before is charged in the transaction that records it, so that nothing leaves unpaid and a crash
charges nothing twice. Two filters check the budget (`RowFilters`), because a coordinator chooses a run's noise after it
has seen the answers of others.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from silotune.communication.privacy.row_accountant import (
    Costs,
    Events,
    RenyiFilter,
    RowFilters,
    RunFilter,
    plan_epsilon,
    scaled,
)
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
CREATE TABLE IF NOT EXISTS row_budgets (unit TEXT PRIMARY KEY, epsilon REAL, delta REAL);
CREATE TABLE IF NOT EXISTS row_shares (run TEXT, config TEXT, events TEXT, share REAL, PRIMARY KEY (run, config));
CREATE TABLE IF NOT EXISTS row_assumptions (run TEXT, config TEXT, colluders INTEGER, PRIMARY KEY (run, config));
"""
"""`row_orders` and `row_budgets` have what is fixed beforehand, `row_runs` and `row_shares` a run's planned steps and
its ε in the second filter; a ledger from before it has no `row_budgets` and no `row_shares`. Of several kinds of steps
`row_runs` has the first, and an answer a row of `row_charges` for each, the later ones under `asked` and a number.
`row_assumptions` has the runs whose ε depends on other silos, because all add one noise (`RowPlan.colluders`)."""

_PLANS = """SELECT run, config, COALESCE(events, json_array(json_array(multiplier, rate, steps))), share, open
    FROM row_runs LEFT JOIN row_shares USING (run, config)"""


_ASSUME = """INSERT INTO row_assumptions VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET colluders = MIN(colluders, excluded.colluders)"""


@dataclass(frozen=True)
class Charge:
    """The privacy cost of one answer (a silo's update), as the ledger checks and records it.

    Args:
        question: digest of all that the answer depends on (`RowPrivacy.digest`); equal ones are charged once.
        config: digest of the run's configuration (`Prepared.recipe`).
        plan: the run's noise; `number` is the answer's round in it.
        message: sha256 of the update; empty until it exists.
    """

    question: str
    run: str
    config: str
    plan: RowPlan
    number: int
    message: str = ""

    @property
    def events(self) -> Events:
        """The answer's noised steps."""
        plan, number = self.plan, self.number
        return ((plan.multiplier, plan.rate, plan.steps[number] - plan.steps[number - 1]),)


class RowLedger:
    """Reserves and charges noised steps on a silo's rows.

    Args:
        budget: what the operator allows; None: costs are recorded and nothing is refused.
    """

    def __init__(self, records: Records, budget: RowBudget | None) -> None:
        self._records = records
        self.budget = budget

    def plan(self, run: str, config: str, proposal: RowPlan, reserve: bool = False, most: float = math.inf) -> RowPlan:
        """Return a run's noise: the least that keeps to its own target, `proposal`, and to what is left of the budget.

        `reserve` sets the run's cost aside, which fixes the noise for its other rounds. Refused if `most` times the
        wanted noise is not enough.
        """
        for _, _, events, *_ in self._records.rows(f"{_PLANS} WHERE run = ? AND config = ?", run, config):
            return proposal.with_noise(json.loads(events))
        plan, steps = proposal, sum(count for *_, count in proposal.events)
        if (filters := self._filters(proposal.unit)) is not None and steps:
            scale = filters.least_scale(self._costs(filters, proposal.unit), proposal.events)
            if scale is None:
                raise InputError(f"the rest of the budget for each {proposal.unit} is too small for {steps} steps")
            if scale > most:
                more = "a run with privacy.more_noise=true, or " if most > 1 else ""  # shares of one noise are fixed
                raise InputError(
                    f"the rest of the budget for each {proposal.unit} takes {scale:.3g} times the noise that the run "
                    f"asks for; allowed: {more}one that costs less"
                )
            plan = proposal.with_noise(scaled(proposal.events, scale))
        if reserve:
            self._reserve(run, config, plan)
        return plan

    def _reserve(self, run: str, config: str, plan: RowPlan) -> None:
        """Set a run's planned steps aside, if they are not yet; the budget's first run fixes the filters."""
        if self._records.rows("SELECT 1 FROM row_runs WHERE run = ? AND config = ?", run, config):
            return
        with self._records.transaction() as connection:
            cost = None
            if (filters := self._filters(plan.unit)) is not None:
                cost, whole = self._run_cost(filters, plan), filters.runs
                orders = plan.unit, json.dumps(filters.steps.orders)
                connection.execute("INSERT OR REPLACE INTO row_orders VALUES (?, ?)", orders)
                if whole is not None:
                    fixed = plan.unit, whole.epsilon, whole.delta
                    connection.execute("INSERT OR IGNORE INTO row_budgets VALUES (?, ?, ?)", fixed)
            values = run, config, plan.unit, *plan.events[0]
            connection.execute("INSERT INTO row_runs VALUES (?, ?, ?, ?, ?, ?, 1)", values)
            planned = run, config, json.dumps(plan.events), cost
            connection.execute("INSERT INTO row_shares VALUES (?, ?, ?, ?)", planned)

    def require(self, charge: Charge) -> None:
        """Refuse an answer that the budget cannot pay, or that differs from an earlier answer with the same draws."""
        for (message,) in self._records.rows("SELECT message FROM row_charges WHERE asked = ?", charge.question):
            if charge.message and message != charge.message:
                raise InputError("the same draws gave another update than before; the difference would have no noise")
            return
        filters = self._filters(charge.plan.unit)
        if filters is None:
            return
        if not filters.allows(self._costs(filters, charge.plan.unit, charge)):
            raise InputError(f"the budget for each {charge.plan.unit} is spent")

    def charge(self, charge: Charge) -> None:
        """Record a charge in the transaction that stores its answer; the last round's also ends the reservation."""
        with self._records.transaction() as connection:
            self.require(charge)
            self._reserve(charge.run, charge.config, charge.plan)
            for place, event in enumerate(charge.events):
                question = f"{charge.question}+{place}" if place else charge.question
                values = question, charge.run, charge.config, charge.plan.unit, *event, charge.message
                connection.execute("INSERT OR IGNORE INTO row_charges VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            if charge.plan.colluders is not None:
                connection.execute(_ASSUME, (charge.run, charge.config, charge.plan.colluders))
            if charge.number == len(charge.plan.steps) - 1:
                self.close(charge.run)

    def close(self, run: str, again: bool = False) -> None:
        """Free what a run reserved and did not use; `again` reserves it once more."""
        with self._records.transaction() as connection:
            connection.execute("UPDATE row_runs SET open = ? WHERE run = ?", (int(again), run))

    def spent(self, unit: str, more: Charge | None = None) -> float | None:
        """Return the ε that answers, with `more`, and open reservations cost each unit; None without its budget."""
        filters = self._filters(unit)
        return None if filters is None else filters.spent(self._costs(filters, unit, more))

    def epsilon_of(self, run: str, delta: float) -> float:
        """Return the ε at δ of the steps that a run planned, or was charged for where it asked for more than planned.

        Steps beyond a plan count as if they had been planned; that all steps keep to the budget is the filters' work.
        """
        plans = self._records.rows(f"{_PLANS} WHERE run = ?", run)
        steps: defaultdict[str, Counter[tuple[float, float]]] = defaultdict(Counter)
        charges = "SELECT config, multiplier, rate, steps FROM row_charges WHERE run = ?"
        for config, *kind, count in self._records.rows(charges, run):
            steps[config][tuple(kind)] += count
        planned = {config: _by_kind(json.loads(events)) for _, config, events, *_ in plans if config in steps}
        total = sum((own | planned.get(config, Counter()) for config, own in steps.items()), Counter())
        return plan_epsilon(tuple((*kind, count) for kind, count in sorted(total.items())), delta)

    def assumed(self, run: str | None = None) -> int | None:
        """Return the fewest colluders that what a run, or any, was charged allows for; None: it depends on no silo."""
        query = "SELECT MIN(colluders) FROM row_assumptions WHERE run = ? OR ? IS NULL"
        ((colluders,),) = self._records.rows(query, run, run)
        return None if colluders is None else int(colluders)

    def charged_runs(self) -> list[str]:
        """Return the runs that were charged for noised steps."""
        return [run for (run,) in self._records.rows("SELECT DISTINCT run FROM row_charges")]

    def _filters(self, unit: str) -> RowFilters | None:
        """Return the filters of a unit's budget, as they were fixed before its first answer."""
        budget = self.budget
        if budget is None or budget.unit != unit:
            return None
        query = """SELECT orders, epsilon, delta FROM row_orders LEFT JOIN row_budgets USING (unit)
            WHERE unit = ? AND (epsilon > 0 OR unit IN (SELECT unit FROM row_charges))"""
        for orders, epsilon, delta in self._records.rows(query, unit):
            orders = tuple(json.loads(orders))
            if epsilon is None:
                return RowFilters(RenyiFilter(budget.epsilon, budget.delta, orders), None, 0.0)
            runs = RunFilter(epsilon, delta) if delta <= budget.delta / 2 else None
            steps = RenyiFilter(budget.epsilon, budget.delta / 2, orders)
            return RowFilters(steps, runs, min(epsilon, budget.epsilon))
        return RowFilters.of(budget.epsilon, budget.delta)

    def _run_cost(self, filters: RowFilters, plan: RowPlan) -> float:
        """Return what a new run costs in the second filter; infinite if it does not fit."""
        rest = filters.left(self._costs(filters, plan.unit))
        return math.inf if filters.runs is None or rest <= 0 else filters.runs.cost(plan.events, rest)

    def _costs(self, filters: RowFilters, unit: str, more: Charge | None = None) -> Costs:
        """Return what all answers, with `more`, and the unused reservations of open runs cost."""
        charged: defaultdict[tuple[str, str], Counter[tuple[float, float]]] = defaultdict(Counter)
        charges = "SELECT run, config, multiplier, rate, steps FROM row_charges WHERE unit = ?"
        for run, config, *kind, steps in self._records.rows(charges, unit):
            charged[run, config][tuple(kind)] += steps
        plans = self._records.rows(f"{_PLANS} WHERE unit = ?", unit)
        planned = {(run, config): rest for run, config, *rest in plans}
        if more is not None:
            if (more.run, more.config) not in planned:
                new = json.dumps(more.plan.events), self._run_cost(filters, more.plan), True
                planned[more.run, more.config] = [*new]
            for *kind, steps in more.events:
                charged[more.run, more.config][tuple(kind)] += steps
        used, runs = Counter[tuple[float, float]](), 0.0
        for key in charged.keys() | planned.keys():
            events, cost, is_open = planned.get(key, ("[]", None, False))
            plan, own = _by_kind(json.loads(events)), charged.get(key)
            used.update(plan | (own or plan) if is_open else own or {})
            if own is not None or is_open:
                runs += math.inf if cost is None or (own and not own <= plan) else cost
        return Costs(filters.steps.costs(tuple((*kind, steps) for kind, steps in used.items())), runs)


def _by_kind(events: Events) -> Counter[tuple[float, float]]:
    """Return how many steps there are of each noise and rate."""
    kinds = Counter[tuple[float, float]]()
    for noise, rate, steps in events:
        kinds[noise, rate] += steps
    return kinds
