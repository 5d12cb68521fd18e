"""A run's promise before it starts: ε and δ in each round and in total, and how far the budget lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from silotune.communication.privacy.accountant import (
    Account,
    CentralAccount,
    GaussianAccount,
    LaplaceAccount,
    SampledCentralAccount,
    affordable,
    gaussian_multiplier,
)
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.config import Config


Choose = Callable[[int], Sequence[str]]
"""Round → the silos that take part in it. Drawn without looking at any row, so it may be known."""

DELTA = 1e-5
"""Of central noise, where `privacy.delta` is not set."""

SEEDED = "whoever knows the run's seed, which noise is drawn from without a secret (privacy.secret; a silo's own)"


class BudgetSpent(InputError):
    """A silo's answer would cost more than is left of its budget."""


@dataclass(frozen=True)
class Privacy:
    """What a run promises.

    Args:
        account: what one use of the noise costs, and many.
        epsilon_round: of one round, at the total's δ.
        noise: what is added to what, in words.
        wanted: the rounds that the configuration asks for.
        rounds: those that the budget lasts for.
        uses: in so many rounds, of the silo that takes part most often; all of them, where a secret draws who does.
        budget: `privacy.epsilon`.
        uncovered: what it does not hold for, in words.
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
        """Refuse a run whose budget lasts for no round at all.

        Raises:
            InputError: with what one round costs.
        """
        if self.rounds == 0:
            one = f"{self.account.total(1):.4g}"
            raise InputError(
                f"privacy.epsilon: a budget of {self.budget:g} is less than the ε = {one} of one round; "
                f"allowed: {one} or more, or more noise"
            )

    def check(self, uses: int, before: float = 0.0) -> None:
        """Refuse a silo's next answer where it would be one too many.

        Args:
            uses: of the noise in this run, with the one to come.
            before: ε that was spent on the same rows in other runs.

        Raises:
            BudgetSpent: it does not fit into the budget.
        """
        if self.budget is not None and affordable(self.account, self.budget - before, uses) < uses:
            others = ", and other runs over the same rows" if before else ""  # how much is not the coordinator's affair
            raise BudgetSpent(
                f"privacy.epsilon: the budget of {self.budget:g} is spent after {uses - 1} rounds "
                f"(ε = {self.account.total(uses - 1):.4g}{others})"
            )

    @property
    def stops(self) -> str:
        """One line where the budget ends the run early; else empty."""
        if self.rounds == self.wanted:
            return ""
        return (
            f"privacy budget: privacy.epsilon={self.budget:g} lasts for {self.rounds} of {self.wanted} rounds; the run "
            f"ends after round {self.rounds} with ε = {self.account.total(self.uses):.4g} spent and its state kept"
        )

    def lines(self) -> list[str]:
        """What is printed before the run starts."""
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
        """`summary.json`'s entry."""
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


def make_privacy(config: Config, sampled: Sequence[tuple[int, int]], choose: Choose) -> Privacy | None:
    """What the configured noise promises; None without noise.

    Args:
        config: the run's.
        sampled: per group of silos, how many there are and how many of them take part in a round.
        choose: which.
    """
    if config.aggregation.noise_multiplier is not None:
        return _central(config, sampled, choose)
    if config.uplink.noise is None:
        return None
    return _local(config, choose)


def _local(config: Config, choose: Choose) -> Privacy:
    uplink = config.uplink
    assert uplink.clip is not None, "the section fills it in"
    noise = f"{uplink.noise} noise in every silo, on a change clipped to an {uplink.norm} norm of {uplink.clip:g}"
    return _by_participation(config, local_account(config), noise, choose)


def _by_participation(config: Config, account: Account, noise: str, choose: Choose) -> Privacy:
    """Where it is known who takes part, a silo pays for the rounds in which it does."""
    counts, budget = _participations(config.rounds, choose), config.privacy.epsilon
    rounds = config.rounds
    if budget is not None:
        fitting = affordable(account, budget, counts[-1])
        rounds = sum(count <= fitting for count in counts)
    uses = counts[rounds - 1] if rounds else 0
    limits = () if config.privacy.secret else (SEEDED,)
    return Privacy(account, account.total(1), noise, config.rounds, rounds, uses, budget, limits)


def local_account(config: Config) -> Account:
    """Of the noise in a silo."""
    assert config.uplink.noise is not None, "there is noise"
    return ACCOUNTS[config.uplink.noise](config)


def _laplace(config: Config) -> Account:
    assert config.uplink.epsilon is not None, "the section fills it in"
    return LaplaceAccount(config.uplink.epsilon, config.privacy.delta or 0.0)


def _gaussian(config: Config) -> Account:
    uplink = config.uplink
    assert uplink.epsilon is not None, "the section fills it in"
    assert uplink.delta is not None, "the section fills it in"
    multiplier = gaussian_multiplier(uplink.epsilon, uplink.delta)
    return GaussianAccount(multiplier, config.privacy.delta or uplink.delta)


ACCOUNTS: dict[str, Callable[[Config], Account]] = {"laplace": _laplace, "gaussian": _gaussian}
"""What each noise of `uplink.NOISES` costs."""


def _participations(rounds: int, choose: Choose) -> list[int]:
    """After each round: in how many the silo took part that did so most often."""
    taken: Counter[str] = Counter()
    counts = []
    for number in range(1, rounds + 1):
        taken.update(choose(number))
        counts.append(max(taken.values()))
    return counts


def _central(config: Config, sampled: Sequence[tuple[int, int]], choose: Choose) -> Privacy:
    aggregation, budget = config.aggregation, config.privacy.epsilon
    assert aggregation.noise_multiplier is not None, "there is central noise"
    assert aggregation.clip is not None, "the section refuses noise without it"
    # the noise is z·C/m; one silo's rows replaced move the mean by 2C/m
    multiplier, delta = aggregation.noise_multiplier / 2, config.privacy.delta or DELTA
    everyone, chosen = (sum(numbers) for numbers in zip(*sampled, strict=True))
    noise = (
        f"gaussian noise on the coordinator's mean over {chosen} of {everyone} silos, each change clipped to an l2 "
        f"norm of {aggregation.clip:g}"
    )
    if config.privacy.secret is None or chosen == everyone:
        return _by_participation(config, CentralAccount(multiplier, delta), noise, choose)
    # where groups are sampled by themselves, it is least hidden in the one of which most take part
    silos, a_round = max(sampled, key=lambda group: group[1] / group[0])
    account = SampledCentralAccount(multiplier, delta, silos, a_round)
    rounds = config.rounds if budget is None else affordable(account, budget, config.rounds)
    return Privacy(account, account.total(1), noise, config.rounds, rounds, rounds, budget)
