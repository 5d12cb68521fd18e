"""Compute the ε at a given δ that many noised rounds cost, one class for each mechanism.

Neighboring federations differ in all rows of one silo. A silo's change is clipped to a norm of C, so replacing its rows
moves it by 2C at most: in L1 for Laplace noise, in L2 for Gaussian noise. Silos hold disjoint rows, so the total of a
federation is the largest total of its silos.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from logging import ERROR, getLogger
from typing import Any

from typing_extensions import override

from silotune.errors import InputError


def import_dp_accounting() -> Any:
    """Return the module dp_accounting."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise InputError(
            "privacy: its accountant needs the package dp-accounting; install it with pip install 'silotune[privacy]'"
        ) from error
    getLogger("absl").setLevel(ERROR)  # it names each order that it leaves out
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
    """The cost of one mechanism, used repeatedly on the same rows.

    Args:
        delta: δ of the total.
    """

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
    """Gaussian noise of `multiplier` times the sensitivity.

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
    """Gaussian noise on the coordinator's mean: a silo spends ε in the rounds in which it takes part."""

    mechanism = "central-gaussian"


class SampledCentralAccount(CentralAccount):
    """Gaussian noise on the mean over `sampled` of `silos` silos, sampled each round without replacement.

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
