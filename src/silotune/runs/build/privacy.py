"""Computes the privacy guarantee of a configured run: its noise, its cost, and the rounds that the budget allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from silotune.communication.privacy.accountant import (
    Account,
    CentralAccount,
    GaussianAccount,
    LaplaceAccount,
    SampledCentralAccount,
    affordable_uses,
    gaussian_multiplier,
)
from silotune.communication.privacy.budget import DELTA, Privacy
from silotune.config import Config

Choose = Callable[[int], Sequence[str]]
"""Round → the silos that take part in it. The draw does not depend on rows, so it may be public."""

SEEDED = "whoever knows the run's seed, which noise is drawn from without a secret (privacy.secret; a silo's own)"


def make_privacy(config: Config, sampled: Sequence[tuple[int, int]], choose: Choose) -> Privacy | None:
    """Return the guarantee of the configured noise; None without noise.

    Args:
        config: the run's configuration.
        sampled: per group of silos its size, and the number of its silos in a round.
        choose: the silos of each round.
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
    """Return the guarantee if participation is public: a silo spends ε in the rounds in which it takes part."""
    counts, budget = _participations(config.rounds, choose), config.privacy.epsilon
    rounds = config.rounds
    if budget is not None:
        fitting = affordable_uses(account, budget, counts[-1])
        rounds = sum(count <= fitting for count in counts)
    uses = counts[rounds - 1] if rounds else 0
    limits = () if config.privacy.secret else (SEEDED,)
    return Privacy(account, account.total(1), noise, config.rounds, rounds, uses, budget, limits)


def local_account(config: Config) -> Account:
    """Return the account of the noise that silos add."""
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
"""Account of each noise of `uplink.NOISES`."""


def _participations(rounds: int, choose: Choose) -> list[int]:
    """Return after each round the number of participations of the most frequent silo."""
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
    # groups are sampled separately; participation is least hidden in the group with the largest sampled fraction
    silos, a_round = max(sampled, key=lambda group: group[1] / group[0])
    account = SampledCentralAccount(multiplier, delta, silos, a_round)
    rounds = config.rounds if budget is None else affordable_uses(account, budget, config.rounds)
    return Privacy(account, account.total(1), noise, config.rounds, rounds, rounds, budget)
