"""Compute the ε at a given δ that many noised rounds cost, a run's guarantee, and the rounds that a budget allows.

Neighboring federations differ in all rows of one silo. A silo's change is clipped to a norm of C, so replacing its rows
moves it by 2C at most: in L1 for Laplace noise, in L2 for Gaussian noise. Silos hold disjoint rows, so the total of a
federation is the largest total of its silos.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from logging import ERROR, getLogger
from typing import Any

from typing_extensions import override

from silotune.errors import InputError, needs


def import_dp_accounting() -> Any:
    """Return the module dp_accounting."""
    with needs("privacy: its accountant needs the package dp-accounting", "privacy"):
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    absl = getLogger("absl")
    if absl.level != ERROR:  # to set a level takes a millisecond, as all loggers' caches are emptied
        absl.setLevel(ERROR)  # it names each order that it leaves out
    return dp_accounting


@lru_cache
def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest standard deviation for (ε, δ), in sensitivities (Balle and Wang 2018, Theorem 8)."""
    return float(import_dp_accounting().get_sigma_gaussian(epsilon, delta))


@lru_cache
def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Return ε at δ of Gaussian noise with this standard deviation, in units of the sensitivity."""
    return float(import_dp_accounting().get_epsilon_gaussian(multiplier, delta))


class Account(ABC):
    """The cost of one mechanism, used repeatedly on the same rows."""

    mechanism: str

    def __init__(self, delta: float) -> None:
        self.delta = delta

    @abstractmethod
    def total(self, times: int) -> float:
        """Return ε at `delta` after `times` uses; it never decreases."""


class LaplaceAccount(Account):
    """Laplace noise of scale 2C/ε: ε per round.

    k rounds cost kε at δ = 0. At a δ above 0 the library's privacy loss distribution gives less. It is computed for one
    number moved by 2C, the worst case among changes of L1 norm 2C
    (`tests/communication/privacy/test_accounting.py`).
    """

    mechanism = "laplace"

    def __init__(self, epsilon: float, delta: float = 0.0) -> None:
        super().__init__(delta)
        self.epsilon = epsilon

    @override
    def total(self, times: int) -> float:
        if times == 0 or self.delta == 0:
            return times * self.epsilon
        return min(times * self.epsilon, _laplace_epsilon(self.epsilon, times, self.delta))


@lru_cache
def _laplace_epsilon(epsilon: float, times: int, delta: float) -> float:
    dp = import_dp_accounting()
    accountant = dp.pld.PLDAccountant(value_discretization_interval=max(1e-4, 1e-3 * epsilon))
    accountant.compose(dp.LaplaceDpEvent(1 / epsilon), times)
    return float(accountant.get_epsilon(delta))


class GaussianAccount(Account):
    """The cost of Gaussian noise of `multiplier` times the sensitivity.

    k rounds are exactly one with a multiplier smaller by √k (Dong, Roth and Su 2022, Corollary 3.3).
    """

    mechanism = "gaussian"

    def __init__(self, multiplier: float, delta: float) -> None:
        super().__init__(delta)
        self.multiplier = multiplier

    @override
    def total(self, times: int) -> float:
        return gaussian_epsilon(self.multiplier / math.sqrt(times), self.delta) if times else 0.0


class CentralAccount(GaussianAccount):
    """The cost of Gaussian noise on the coordinator's mean; a silo pays only for rounds in which it takes part."""

    mechanism = "central-gaussian"


class SampledCentralAccount(CentralAccount):
    """The cost of noise on the mean over `sampled` of `silos` silos, sampled each round without replacement.

    The smaller of `CentralAccount` over all rounds and of the library's bound for sampling (Wang, Balle and
    Kasiviswanathan 2019, Theorem 27). The latter requires that the sampled silos stay secret: they must be drawn from
    a secret instead of the run's seed.
    """

    def __init__(self, multiplier: float, delta: float, silos: int, sampled: int) -> None:
        super().__init__(multiplier, delta)
        self.silos = silos
        self.sampled = sampled

    @override
    def total(self, times: int) -> float:
        """Return the total cost; `times` counts all rounds."""
        plain = super().total(times)
        if times == 0 or self.sampled >= self.silos:
            return plain
        return min(plain, _sampled_epsilon(self.multiplier, self.silos, self.sampled, times, self.delta))


@lru_cache
def _sampled_epsilon(multiplier: float, silos: int, sampled: int, times: int, delta: float) -> float:
    dp = import_dp_accounting()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(silos, sampled, dp.GaussianDpEvent(multiplier))
    accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def affordable_uses(account: Account, budget: float, max_uses: int) -> int:
    """Return the number of uses that fit into a budget, `max_uses` at most."""
    low, high = 0, max_uses
    while low < high:
        middle = (low + high + 1) // 2
        if account.total(middle) <= budget * (1 + 1e-9):  # 3 · 0.1 fits into 0.3
            low = middle
        else:
            high = middle - 1
    return low


DELTA = 1e-5
"""δ of noise on rows and of central noise without `privacy.delta`, unless `largest_delta` is less."""


def largest_delta(units: int) -> float:
    """Return the largest δ that protects each of so many units: at 1 / units a mechanism may publish one of them."""
    return 0.1 / max(units, 1)


def usual_delta(units: int) -> float:
    """Return the δ of noise on the rows of so many units where none is given."""
    return min(DELTA, largest_delta(units))


def assumption(colluders: int) -> str:
    """Return in words what ε depends on where all silos share one noise (`privacy.shares`)."""
    return f"as long as at most {colluders} of the other silos spy, help the coordinator or leave out their noise"


def assuming(colluders: int | None) -> str:
    """Return what follows a statement of ε: nothing where it depends on no other silo."""
    return "" if colluders is None else f", {assumption(colluders)}"


class BudgetSpent(InputError):
    """A silo's reply would cost more than the rest of its budget."""


@dataclass(frozen=True)
class Privacy:
    """The privacy guarantee of a run.

    Args:
        epsilon_round: ε of one round, at the total's δ.
        rounds: the number of rounds that the budget allows.
        uses: participations of the most frequent silo in `rounds` rounds; all rounds if silos are drawn by a secret.
        uncovered: limits of the guarantee, for printing.
    """

    account: Account
    epsilon_round: float
    noise: str
    target: int
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
        """Refuse a silo's next reply, one of `uses`, if it exceeds the budget; `before` is the ε of other runs."""
        if self.budget is not None and affordable_uses(self.account, self.budget - before, uses) < uses:
            others = ", and other runs over the same rows" if before else ""  # the coordinator does not learn how much
            raise BudgetSpent(
                f"privacy.epsilon: the budget of {self.budget:g} is spent after {uses - 1} rounds "
                f"(ε = {self.account.total(uses - 1):.4g}{others})"
            )

    @property
    def stops(self) -> str:
        """A line for a run that the budget ends early; else empty."""
        if self.rounds == self.target:
            return ""
        return (
            f"privacy budget: privacy.epsilon={self.budget:g} lasts for {self.rounds} of {self.target} rounds; the run "
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
