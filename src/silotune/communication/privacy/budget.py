"""Compute a run's privacy guarantee before it starts, and the rounds that a budget allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from silotune.communication.privacy.accountant import (
    Account,
    SampledCentralAccount,
    affordable_uses,
)
from silotune.errors import InputError

DELTA = 1e-5
"""δ of central noise without `privacy.delta`."""


class BudgetSpent(InputError):
    """A silo's reply would cost more than the rest of its budget."""


@dataclass(frozen=True)
class Privacy:
    """The privacy guarantee of a run.

    Args:
        account: the cost of the noise by number of uses.
        epsilon_round: ε of one round, at the total's δ.
        noise: description of the noise for printing.
        wanted: the configured number of rounds.
        rounds: the number of rounds that the budget allows.
        uses: participations of the most frequent silo in `rounds` rounds; all rounds if silos are drawn by a secret.
        budget: `privacy.epsilon`.
        uncovered: limits of the guarantee, for printing.
    """

    account: Account
    epsilon_round: float
    noise: str
    wanted: int
    rounds: int
    uses: int
    budget: float | None
    uncovered: tuple[str, ...] = ()

    def require_a_round(self) -> None:
        """Refuse a run whose budget is less than the cost of one round."""
        if self.rounds == 0:
            cost = f"{self.account.total(1):.4g}"
            raise InputError(
                f"privacy.epsilon: a budget of {self.budget:g} is less than the ε = {cost} of one round; "
                f"allowed: {cost} or more, or more noise"
            )

    def check(self, uses: int, before: float = 0.0) -> None:
        """Refuse a silo's next reply if it exceeds the budget.

        Args:
            uses: uses of the noise in this run, the next one included.
            before: ε spent on the same rows in other runs.

        Raises:
            BudgetSpent: the budget does not allow it.
        """
        if self.budget is not None and affordable_uses(self.account, self.budget - before, uses) < uses:
            others = ", and other runs over the same rows" if before else ""  # the coordinator does not learn how much
            raise BudgetSpent(
                f"privacy.epsilon: the budget of {self.budget:g} is spent after {uses - 1} rounds "
                f"(ε = {self.account.total(uses - 1):.4g}{others})"
            )

    @property
    def stops(self) -> str:
        """A line for a run that the budget ends early; else empty."""
        if self.rounds == self.wanted:
            return ""
        return (
            f"privacy budget: privacy.epsilon={self.budget:g} lasts for {self.rounds} of {self.wanted} rounds; the run "
            f"ends after round {self.rounds} with ε = {self.account.total(self.uses):.4g} spent and its state kept"
        )

    def lines(self) -> list[str]:
        """Return the lines about the privacy budget that a run prints before it starts."""
        often = f"a silo takes part in up to {self.uses} of {self.rounds} rounds"
        if isinstance(self.account, SampledCentralAccount):
            often = f"over {self.rounds} rounds; a secret draws who takes part"
        total = (
            f"privacy: {self.noise}; ε = {self.epsilon_round:.4g} a round, ε = {self.account.total(self.uses):.4g} in "
            f"total at δ = {self.account.delta:g} ({often})"
        )
        limits = f"privacy: not for {'; nor for '.join(self.uncovered)}" if self.uncovered else ""
        return [line for line in (total, limits, self.stops) if line]

    def summary(self) -> dict[str, Any]:
        """Return the entry `privacy` of `summary.json`."""
        return {
            "mechanism": self.account.mechanism,
            "epsilon_round": self.epsilon_round,
            "epsilon_total": self.account.total(self.uses),
            "delta": self.account.delta,
            "participations": self.uses,
            "noise": self.noise,
            "budget": self.budget,
            **({"uncovered": "; ".join(self.uncovered)} if self.uncovered else {}),
        }
